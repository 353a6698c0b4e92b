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


def test_the_bytes_themselves_are_no_inputs() -> None:
    for pixels in (Pixels(), Pixels(scale=16), Pixels(mean=[0.5, 0.4], std=[0.2, 0.3])):
        x = torch.arange(pixels.scale + 1.0).expand(3, 2, 1, -1)
        assert not pixels.can_give(x)
        assert not pixels.can_give(-x)
        assert pixels.can_give(pixels.to_inputs_(x.clone()))


def test_pixels_out_of_a_file_are_equal_to_those_that_were_written() -> None:
    assert Pixels(mean=[0.5], std=[0.2]) == Pixels(mean=(0.5,), std=(0.2,))
    # A file may hold a whole number that only a float can hold.
    assert Pixels(mean=[10**30]).to_inputs_(torch.zeros(1, 1)).item() == pytest.approx(-1e30)


def test_pixels_in_words() -> None:
    assert str(Pixels(scale=16)) == "byte / 16"
    assert (
        str(Pixels(mean=[0.5, 0.4], std=[0.2, 0.3])) == "(byte / 255 - mean) / std with mean 0.5, 0.4 and std 0.2, 0.3"
    )
