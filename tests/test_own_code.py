"""The user's own code is known by what runs: by every change that matters, and by none that does not."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.algorithms import DPSGD
from manyheads.experiment import Experiment
from manyheads.own_code import changed, hashes

LOSS = """
def loss(output, y{default}):
    {docstring}
    inner = lambda x: {body}  # {comment}
    return inner(output) if "a" in {{"b", "c", {word}}} else y
"""


def made(**words: str) -> dict[str, str]:
    """The hashes of an experiment with a loss that was typed somewhere."""
    usual = {"default": "", "docstring": "'''A loss.'''", "body": "x + 1", "comment": "", "above": "", "word": "'a'"}
    names: dict[str, Any] = {"__name__": "mine"}
    given = {**usual, **words}
    exec(compile(given["above"] + LOSS.format(**given), "nowhere.py", "exec"), names)
    return hashes(Experiment(loss=names["loss"]))


@pytest.mark.parametrize(
    "words", [{"body": "x + 2"}, {"body": "x - 1"}, {"body": "abs(x)"}, {"default": ", k=1"}, {"word": "'d'"}]
)
def test_what_runs_counts(words: dict[str, str]) -> None:
    assert changed(made(), made(**words)) == "loss"


@pytest.mark.parametrize("words", [{}, {"docstring": "'''Another.'''"}, {"comment": "why"}, {"above": "\n\nk = 7\n"}])
def test_what_does_not_run_does_not(words: dict[str, str]) -> None:
    assert changed(made(), made(**words)) is None
    assert made().keys() == {"python", "loss"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"body": "x.sin()"}, {"body": "x.cos()"}),
        ({"default": ", k=1"}, {"default": ", k=2"}),
        ({"default": ", *, k=1"}, {"default": ", *, k=2"}),
    ],
)
def test_a_name_or_a_default_alone_counts(one: dict[str, str], other: dict[str, str]) -> None:
    assert changed(made(**one), made(**other)) == "loss"


def test_a_set_has_no_order() -> None:
    """Of words its order differs from process to process; 0 and 8 fall on one place, in the order they came."""
    assert changed(made(body="x in {0, 8}"), made(body="x in {8, 0}")) is None


@pytest.mark.parametrize("field", ["loss", "metric", "transform"])
def test_every_function_of_an_experiment_counts(field: str) -> None:
    one, other = (hashes(Experiment(**{field: function})) for function in (lambda x, y: x + y, lambda x, y: x - y))
    assert changed(one, other) == field
    assert one["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_what_a_decorator_wraps_counts() -> None:
    def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def both(*args: Tensor) -> Tensor:
            return 2 * function(*args)

        return both

    one, other = (hashes(Experiment(loss=doubled(f))) for f in (lambda x, y: x + y, lambda x, y: x - y))
    assert changed(one, other) == "loss"


def test_a_default_that_only_marks_what_is_not_given_stops_nobody() -> None:
    assert changed(made(default=", k=object()"), made(default=", k=object()")) is None
    assert changed(made(default=", k=object(), a=1"), made(default=", k=object(), a=2")) == "loss"
    assert changed(made(default=", k={'a': 1}"), made(default=", k={'a': 2}")) == "loss"


def test_another_python_cannot_tell() -> None:
    assert changed({**made(), "python": "3.0"}, made(body="x + 2")) is None
    assert changed({}, made()) is None


def test_a_lambda_is_itself_wherever_it_stands() -> None:
    one, other = (Experiment(rounds=rounds, loss=lambda output, y: output - y) for rounds in (2, 3))
    third = Experiment(rounds=3, loss=lambda output, y: output + y)
    assert hashes(one) == hashes(other) != hashes(third)


def test_what_is_the_packages_or_torchs_is_not_looked_at() -> None:
    plain = functools.partial(F.cross_entropy, reduction="none")
    assert hashes(Experiment(loss=plain, metric=nn.MSELoss(), model=nn.Linear(3, 2))) == {}
    orphan = functools.partial(_scaled(1.0))
    orphan.func.__module__ = None  # pyright: ignore[reportAttributeAccessIssue]
    assert "loss" in hashes(Experiment(loss=orphan))


def _scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return factor * output

    return loss


def make_net() -> type[nn.Module]:
    class Net(nn.Module):
        width = 4
        _depth = 2

        @property
        def wide(self) -> int:
            return 2 * self.width

        @functools.cached_property
        def deep(self) -> int:
            return 3 * self.width

        @staticmethod
        def squash(x: Tensor) -> Tensor:
            return torch.tanh(x)

    return Net


@pytest.mark.parametrize(
    "change",
    [
        {"width": 5},
        {"_depth": 3},
        {"wide": property(lambda self: 3)},
        {"deep": functools.cached_property(lambda self: 3)},
        {"squash": staticmethod(lambda x: x)},
    ],
)
def test_a_class_is_its_functions_and_plain_attributes(change: dict[str, Any]) -> None:
    one, other = make_net(), make_net()
    before = hashes(Experiment(model=one))
    assert before == hashes(Experiment(model=one())) == hashes(Experiment(model=other()))
    for name, value in change.items():
        setattr(other, name, value)
    assert changed(before, hashes(Experiment(model=other()))) == "model"


def test_the_title_of_an_algorithm_does_not_count_and_that_of_a_net_does() -> None:
    """The one is only shown; the other may be anything."""

    def made(base: type, **held: Any) -> Any:
        return dataclass(frozen=True, kw_only=True)(type("Mine", (base,), {"__module__": "mine", **held}))

    plain = {"name": "mine", "title": "Mine", "order": "mix-train"}
    one, renamed, other = (
        hashes(Experiment(algorithm=made(DPSGD, **{**plain, **changes})()))
        for changes in ({}, {"title": "My own"}, {"order": "train-mix"})
    )
    assert one == renamed and changed(one, other) == "algorithm"
    one, other = (hashes(Experiment(model=type("Net", (nn.Module,), {"__module__": "m", "title": t}))) for t in "ab")
    assert changed(one, other) == "model"


def test_the_attributes_of_a_class_have_no_order() -> None:
    one, other = (
        type("Net", (nn.Module,), {"__module__": "mine", **held}) for held in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert hashes(Experiment(model=one)) == hashes(Experiment(model=other)) != {}


def test_a_cached_factory_is_the_function_in_it() -> None:
    one, same = (functools.cache(lambda: nn.Linear(3, 2)) for _ in range(2))
    other = functools.lru_cache(maxsize=2)(lambda: nn.Linear(3, 2, bias=False))
    assert hashes(Experiment(model=one)) == hashes(Experiment(model=same)) != {}
    assert changed(hashes(Experiment(model=one)), hashes(Experiment(model=other))) == "model"


def test_a_net_by_its_name_is_what_that_names() -> None:
    assert hashes(Experiment(model=f"{__name__}:make_net")) == hashes(Experiment(model=make_net)) != {}
