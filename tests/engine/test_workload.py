"""What an engine works on."""

from torch import nn

from manyheads.models.dropout import dropouts
from manyheads.models.split import cut, twin


def twice_dropped(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 6), nn.Dropout(0.2), nn.ReLU(), nn.Linear(6, num_outputs)
    )


def test_dropout_layers_keep_their_numbers_in_parts_and_copies(problem):
    model = problem(twice_dropped).work.model
    assert {layer.p: layer.number for layer in dropouts(model).values()} == {0.1: 0, 0.2: 1}
    assert [layer.number for layer in dropouts(cut(twin(model), 2)[1]).values()] == [1]
