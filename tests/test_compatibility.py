"""What does not go together is refused in one line, before anything is trained."""

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from manyheads.algorithms import DPSGD, DePRL, FedRep, FedRoD, Local
from manyheads.data.arrays import from_arrays
from manyheads.errors import UserError
from manyheads.rounds import train


def _normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


def test_single_samples_and_batchnorm_exclude_each_other(lab):
    with pytest.raises(UserError, match="batch-size 1"):
        lab.opened(lab.tiny(DePRL(), model=_normed, batch_size=1))


def test_workers_whom_batchnorm_keeps_from_training_are_counted_and_refused_if_they_are_all(lab):
    def opened(*sizes: int, model: object = _normed) -> list[str]:
        return lab.opened(lab.tiny(DePRL(), data=lab.blobs(sizes=sizes), model=model)).notes

    said = "2 workers with one train sample will not train: BatchNorm needs two, --norm group does not."
    assert said in opened(1, 5, 1, 7)
    assert not any("one train sample" in note for note in opened(2, 5, 3, 7))
    with pytest.raises(UserError, match="every worker has one train sample, and BatchNorm needs two: give fewer"):
        opened(1, 1, 1, 1)
    assert not any("one train sample" in note for note in opened(1, 1, 1, 1, model="mlp:4"))


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))


@pytest.mark.parametrize("algorithm", [DePRL(), FedRep()], ids=lambda algorithm: algorithm.name)
def test_a_head_that_is_the_whole_net_is_refused_where_only_the_rest_is_shared(lab, algorithm):
    with pytest.raises(UserError) as caught:
        lab.opened(lab.tiny(algorithm, model=_net, head="0"))
    assert str(caught.value) == (
        f"the head is the whole net, so {algorithm.name} would share nothing: "
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
    with pytest.raises(UserError, match=r"the targets are floats, not classes: .* a --loss"):
        lab.opened(lab.tiny(DePRL(), data=numbers))

    def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().mean(1)

    for wrong in ({"loss": torch.nn.functional.mse_loss}, {"loss": squares, "metric": torch.nn.functional.mse_loss}):
        with pytest.raises(UserError, match=r"gives \[\] for output \[3, 2\] and target \[3, 2\]: it must give one"):
            lab.opened(lab.tiny(DePRL(), data=numbers, **wrong))

    # Targets [n] against outputs [n, 1]: each sample's would be compared with those of all others.
    flat = replace(numbers, y_train=data.x_train[:, 0], y_test=data.x_test[:, 0])
    with pytest.raises(UserError, match=r"the loss of a sample depends on .* output \[3, 1\] and target \[3\] match"):
        lab.opened(lab.tiny(DePRL(), data=flat, loss=squares))


def test_a_transform_gives_finite_numbers(lab):
    with pytest.raises(UserError, match="the transform gives NaN or infinite numbers"):
        lab.opened(lab.tiny(DePRL(), transform=lambda x, _: x.where(x == x.max(), torch.nan)))


_CALLS = count(1)


def _generators() -> str:
    """Where those stand that a transform is not to draw from."""
    return repr((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))  # noqa: NPY002 (it is read)


def _by_torch(x, generator):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(int(generator.integers(2**63))))


@pytest.mark.parametrize(
    ("transform", "repeats"),
    [
        (lambda x, _: x.flip(1), True),
        (lambda x, generator: x.flip(1) if generator.random() < 0.5 else x, True),
        (_by_torch, True),
        (lambda x, _: x.flip(1) if torch.rand(()) < 0.5 else x, False),
        (lambda x, _: x.flip(1) if torch.rand(()) < 0.25 else x, False),
        (lambda x, _: x.add_(torch.rand(())), False),
        (lambda x, _: x * np.random.rand(), False),  # noqa: NPY002 (what must not be)
        (lambda x, _: x * random.random(), False),
        (lambda x, _: x * next(_CALLS), False),
    ],
    ids=["still", "its own", "by torch", "torch's", "seldom", "in place", "numpy's", "Python's", "counts"],
)
def test_a_transform_draws_from_its_generator_alone(lab, transform, repeats):
    before = _generators()
    with nullcontext() if repeats else pytest.raises(UserError, match="called again with the same generator"):
        lab.opened(lab.tiny(DePRL(), transform=transform))
    assert _generators() == before


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(lambda x, rng: x[:1], r"\[1, 6\]"), (lambda x, rng: x.numpy(), "ndarray"), (lambda x, rng: x.sum(), r"\[\]")],
    ids=["fewer", "array", "number"],
)
def test_a_transform_keeps_the_shape(lab, wrong, found):
    with pytest.raises(UserError, match=rf"the transform gives {found} for 3 samples: .* \[3, 6\]"):
        lab.opened(lab.tiny(DePRL(), transform=wrong))


def test_a_transform_keeps_the_shape_in_every_draw(lab):
    calls = count()
    with pytest.raises(UserError, match=r"the transform gives \[1, 6\] for 3 samples"):
        lab.opened(lab.tiny(DePRL(), transform=lambda x, _: x[:1] if next(calls) == 5 else x))


def _notes(lab, model: object) -> list[str]:
    return lab.opened(lab.tiny(DePRL(), model=model)).notes


class Tagger(torch.nn.Module):
    """Scores for each of two places in a sample, [samples, 2, 3]."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body, self.out = torch.nn.Linear(3, 5), torch.nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x.unflatten(1, (2, 3))).tanh())


def test_outputs_are_one_score_for_each_class_unless_the_loss_is_ones_own(lab):
    with pytest.raises(UserError, match=r"gives 2x3 outputs for 3 classes: give it 3, or a --loss of your own"):
        lab.opened(lab.tiny(DePRL(), model=Tagger))
    few = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with pytest.raises(UserError, match=r"gives 2 outputs for 3 classes: give it 3, or"):
        lab.opened(lab.tiny(DePRL(), model=few))
    many = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5))
    assert any("gives 5 outputs for 3 classes, and 2 are never right" in note for note in _notes(lab, many))
    assert not any("outputs" in note for note in _notes(lab, "mlp:4"))
    data = lab.blobs()
    from_one = replace(data, y_train=data.y_train + 1, y_test=data.y_test + 1, num_classes=4)
    with pytest.raises(UserError, match=r"give it 4 \(labels run from 1 to 3: number them from 0\), or"):
        lab.opened(lab.tiny(DePRL(), data=from_one, model=few))

    def hinge(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (1 - output[:, 0] * (2.0 * (y > 0) - 1)).relu()

    def right(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((output[:, 0] > 0) == (y > 0)).double()

    one = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    lab.opened(lab.tiny(DePRL(), model=one, loss=hinge, metric=right))


def test_a_loss_that_fails_is_told_in_one_line(lab):
    def wrong(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output[:, :2] - y).square().mean(1)

    with pytest.raises(UserError, match=r"^the loss fails in .*compatibility.py, line \d+: RuntimeError: The size"):
        lab.opened(lab.tiny(DePRL(), loss=wrong))


class Cut(torch.nn.Module):
    """A net whose gradients end somewhere."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.unused = where, torch.nn.Linear(6, 5)
        self.body, self.out = torch.nn.Linear(6, 5), Last(where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.training and self.where != "no_grad"):
            features = self.body(x).tanh()
        return self.out(features.detach() if self.where == "features" else features)


class Last(torch.nn.Linear):
    def __init__(self, where: str) -> None:
        super().__init__(5, 3)
        self.where = where

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.where == "weights":
            return torch.nn.functional.linear(input, self.weight.detach())
        output = super().forward(input)
        return output.detach() if self.where == "output" else output


@pytest.mark.parametrize(
    ("where", "missed"),
    [("output", "model"), ("features", "representation"), ("no_grad", "representation"), ("weights", "head")],
)
def test_what_no_gradient_comes_to_is_named(lab, where, missed):
    for algorithm in (DePRL(), FedRoD()):
        with pytest.raises(UserError, match=rf"^no gradient reaches the {missed}: remove detach\(\) and no_grad\(\)"):
            lab.opened(lab.tiny(algorithm, model=Cut(where)))


class Table(torch.nn.Module):
    """Looks each sample's first numbers up in a table."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(9, 4, **options), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.long().abs().clamp(max=8)).mean(1))


def test_sparse_gradients_are_refused(lab):
    with pytest.raises(UserError, match=r"^the gradient of representation\.table\.weight is sparse: leave sparse=True"):
        lab.opened(lab.tiny(DePRL(), model=Table(sparse=True)))
    lab.opened(lab.tiny(DePRL(), model=Table()))


def test_where_torch_computes_no_gradients_nobody_trains(lab):
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(UserError, match=r"^torch computes no gradients here: train outside of no_grad\(\)"):
            lab.opened(lab.tiny(DePRL()))


def test_gradients_need_come_neither_to_every_parameter_nor_to_what_is_not_trained(lab):
    for algorithm in (DePRL(), FedRoD()):
        lab.opened(lab.tiny(algorithm, model=Cut("nowhere")))
    held = Cut("features")
    for layer in (held.body, held.unused):
        layer.requires_grad_(requires_grad=False)
    lab.opened(lab.tiny(DePRL(), model=held))


def test_a_loss_that_lets_no_gradient_through_is_refused(lab):
    def wrong(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.detach(), y, reduction="none")

    with pytest.raises(UserError, match=r"^no gradient passes through the loss: compute it with torch's functions"):
        lab.opened(lab.tiny(DePRL(), loss=wrong))


class Broken(torch.autograd.Function):
    """Numbers as they are, without a derivative."""

    @staticmethod
    def forward(ctx, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> torch.Tensor:
        raise ValueError("not thought of")


def test_a_gradient_that_fails_is_told_in_one_line(lab):
    def wrong(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(Broken.apply(output), y, reduction="none")

    with pytest.raises(UserError, match=r"^the gradient of the loss fails in .*compatibility.py, line \d+: ValueError"):
        lab.opened(lab.tiny(DePRL(), loss=wrong))


def test_to_look_for_gradients_draws_nothing_from_torchs_generator(lab):
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.RReLU(), torch.nn.Linear(5, 3))
    before = _generators()
    lab.opened(lab.tiny(DePRL(), model=net))
    assert _generators() == before


class Reader(torch.nn.Module):
    """Looks whole numbers up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x.long()).mean(1))


def test_bytes_that_are_looked_up_in_a_table_are_refused(lab):
    words, labels = np.arange(240).reshape(60, 4) % 9, np.arange(60) % 3
    with pytest.raises(UserError, match=r"holds bytes, .* but representation.table looks them up in a table: give"):
        lab.opened(lab.tiny(DePRL(), data=from_arrays(words.astype(np.uint8), labels), model=Reader, split="iid"))
    lab.opened(lab.tiny(DePRL(), data=from_arrays(words, labels), model=Reader, split="iid"))


class FromOne(Reader):
    """Takes words that count from 1, in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(1))


def test_a_net_that_changes_its_inputs_is_tried_on_copies(lab):
    words = 1.0 + np.arange(240).reshape(60, 4) % 9
    lab.opened(lab.tiny(DePRL(), data=from_arrays(words, np.arange(60) % 3), split="iid", model=FromOne()))


def test_a_sample_that_the_net_cannot_take_is_told_with_the_round(lab):
    words, labels = np.arange(240).reshape(60, 4) % 9, np.arange(60) % 3
    words[17] = 9
    experiment = lab.tiny(DePRL(), data=from_arrays(words, labels), model=Reader, split="iid")
    with pytest.raises(
        UserError, match=r"^in round 1 of deprl your code fails in .*compatibility.py, line \d+: IndexError"
    ):
        list(train(experiment, lab.cpu))


class Words(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_sample_that_a_layer_of_torchs_cannot_take_is_told_with_the_layer(lab, engine):
    words, labels = np.arange(240).reshape(60, 4) % 9, np.arange(60) % 3
    words[17] = 9

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(Words(), torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(16, 3))

    experiment = lab.tiny(DePRL(), data=from_arrays(words, labels), model=net, split="iid")
    with pytest.raises(
        UserError, match=r"^in round 1 of deprl your code fails in Embedding\(9, 4\): IndexError: index out of"
    ):
        list(train(experiment, replace(lab.cpu, engine=engine)))


class Centred(torch.nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def test_a_net_that_mixes_samples_is_told(lab):
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), Centred(), torch.nn.Linear(4, 3))
    said = "a sample's output or gradient depends on the others in its batch (is batch_first missing?): engine 'loop'."
    assert said in lab.opened(lab.tiny(DePRL(), model=net)).notes
    assert said in lab.opened(lab.tiny(DePRL(), model=Table(scale_grad_by_freq=True))).notes
    assert said not in lab.opened(lab.tiny(DePRL(), model=Table())).notes
