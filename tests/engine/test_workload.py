"""What an engine works on."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from manyheads.engine.workload import sums_of
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


def test_features_far_larger_than_the_data_are_not_cached(problem):
    """Unless there are few of them all the same."""
    work = problem(twice_dropped).work
    assert work.worth_caching(64) and work.worth_caching(1000)
    samples = torch.zeros(1).expand(50_000, 3, 32, 32)
    many = replace(work.train, x=samples, index=torch.arange(50_000), y=torch.zeros(50_000, dtype=torch.int64))
    cifar = replace(work, train=many)
    assert cifar.worth_caching(512)
    assert not cifar.worth_caching(64 * 32 * 32), "the first layer of ResNet-18"


def test_scores_without_weight_count_for_nothing_even_if_they_are_no_numbers():
    def score(output: Tensor, y: Tensor) -> Tensor:
        return output / y

    output, weight = torch.tensor([3.0, 1.0, 0.0, -1.0]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    # A sample more than there are weights: what follows the workers' own.
    sums = sums_of([score], torch.cat([output, output[:1]]), torch.tensor([1, 0, 0, 1, 1]), weight, torch.float64)
    assert sums.tolist() == [[6.0, -1.0], [2.0, 1.0]]
