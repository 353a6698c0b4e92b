"""What does not go together is refused in one line, before anything is trained."""

from dataclasses import replace

import pytest
import torch

from manyheads.algorithms import DPSGD, DePRL, FedRep, FedRoD, Local
from manyheads.errors import UserError


def test_single_samples_and_batchnorm_exclude_each_other(lab):
    def normed() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))

    with pytest.raises(UserError, match="batch-size 1"):
        lab.opened(lab.tiny(DePRL(), model=normed, batch_size=1))


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))


@pytest.mark.parametrize("algorithm", [DePRL(), FedRep()], ids=lambda algorithm: algorithm.name)
def test_a_head_that_is_the_whole_net_is_refused_where_only_the_rest_is_shared(lab, algorithm):
    with pytest.raises(UserError) as caught:
        lab.opened(lab.tiny(algorithm, model=_net, head="0"))
    assert str(caught.value) == (
        f"the head is the whole net, and {algorithm.name} would share nothing: "
        "give a later layer as --head (2, 3), or say --head all."
    )
    with pytest.raises(UserError, match=r"share nothing: give a net with more layers, or say --head all\.$"):
        lab.opened(lab.tiny(algorithm, model=torch.nn.Sequential(torch.nn.Linear(6, 3))))


@pytest.mark.parametrize("algorithm", [DPSGD(), FedRoD(), Local()], ids=lambda algorithm: algorithm.name)
def test_a_head_that_is_the_whole_net_is_fine_where_it_is_asked_for_or_changes_nothing(lab, algorithm):
    lab.opened(lab.tiny(algorithm, model=_net, head="0"))
    lab.opened(lab.tiny(DePRL(), model=_net, head="all"))


def test_a_regression_needs_a_loss_that_gives_every_sample_a_number_of_its_own(lab):
    data = lab.blobs()
    numbers = replace(data, y_train=data.x_train[:, :2], y_test=data.x_test[:, :2], num_classes=None)
    with pytest.raises(UserError, match=r"the targets are floats, not classes: .* a loss"):
        lab.opened(lab.tiny(DePRL(), data=numbers))

    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().mean(1)

    for wrong in ({"loss": torch.nn.functional.mse_loss}, {"loss": squares, "metric": torch.nn.functional.mse_loss}):
        with pytest.raises(UserError, match=r"gives \[\] for 3 samples: it must give one number a sample"):
            lab.opened(lab.tiny(DePRL(), data=numbers, **wrong))

    # Targets [n] against outputs [n, 1]: each sample's would be compared with those of all others.
    flat = replace(numbers, y_train=data.x_train[:, 0], y_test=data.x_test[:, 0])
    with pytest.raises(UserError, match=r"the loss of a sample depends on .* output \[3, 1\] and target \[3\] fit"):
        lab.opened(lab.tiny(DePRL(), data=flat, loss=squares))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(lambda x, rng: x[:1], r"\[1, 6\]"), (lambda x, rng: x.numpy(), "ndarray"), (lambda x, rng: x.sum(), r"\[\]")],
    ids=["fewer", "array", "number"],
)
def test_a_transform_keeps_the_shape(lab, wrong, found):
    with pytest.raises(UserError, match=rf"the transform gives {found} for 3 samples: .* \[3, 6\]"):
        lab.opened(lab.tiny(DePRL(), transform=wrong))
