import numpy as np
import pytest
import torch

from manyheads.data.pixels import Pixels


@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 4, 2)])
def test_bytes_of_any_shape_become_fractions(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, (7, *shape)).float()
    assert torch.equal(Pixels().to_inputs_(x.clone()), x / 255)
    assert torch.equal(Pixels(scale=16).to_inputs_(x.clone()), x / 16)


def test_every_channel_has_a_mean_and_a_deviation_of_its_own() -> None:
    x = torch.tensor([[[[0.0, 51.0]], [[255.0, 51.0]]]])
    inputs = Pixels(mean=[0.2, 0.4], std=[0.1, 0.2]).to_inputs_(x)
    assert np.allclose(inputs, [[[[-2, 0]], [[3, -1]]]], atol=1e-6)
    assert inputs is x
