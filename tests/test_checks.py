"""What fields take: by their types or their words, with None where it is one of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from manyheads.checks import field_kinds, normalise_fields
from manyheads.errors import UserError
from manyheads.experiment import Experiment


@dataclass(frozen=True)
class Owner:
    family: ClassVar[str] = "none of the fields"
    word: Literal["a", "b"] = "a"
    word_or_none: Literal["a", "b"] | None = None
    none_as_word: Literal["a", None] = None
    number: float | None = 1.0
    count: int = 1
    switch: bool = False
    folder: Path | None = None
    data: str | int = "digits"
    anything: Any = None
    noted: Annotated[int, {"unhashable": True}] = 0

    def __post_init__(self) -> None:
        normalise_fields(self)


@pytest.mark.parametrize(
    "fitting",
    [
        {"word": "b"},
        {"word_or_none": None},
        {"none_as_word": None},
        {"none_as_word": "a"},
        {"number": 2.0},
        {"number": None},
        {"data": 3},
        {"anything": object()},
        {"noted": 3},
    ],
)
def test_what_fits_stays(fitting: dict[str, Any]) -> None:
    ((name, value),) = fitting.items()
    assert getattr(Owner(**fitting), name) is value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"word": "c"}, "unknown --word 'c'"),
        ({"word": None}, "unknown --word 'None'"),
        ({"word": np.eye(2)}, "unknown --word '(ndarray)'. Allowed: a, b."),
        ({"word_or_none": "c"}, "unknown --word-or-none 'c'"),
        ({"number": "1"}, "--number '1' is of the wrong type: give float"),
        ({"count": 1.0}, "--count 1.0 is of the wrong type: give int"),
        ({"count": True}, "--count True is of the wrong type: give int"),
        ({"switch": 1}, "--switch 1 is of the wrong type: give bool"),
        ({"number": float("nan")}, "--number nan is not finite, or too large: give another number."),
        ({"number": -float("inf")}, "--number -inf is not finite"),
        ({"number": 10**400}, "--number 10000"),
        ({"count": 10**400}, "--count 10000"),
        ({"count": 2**63}, "--count 9223372036854775808 is too large: give a number below 2**63."),
        ({"switch": 2**63}, "--switch 9223372036854775808 is of the wrong type: give bool"),
        ({"data": None}, "--data None is of the wrong type: give str or int"),
        ({"noted": "x"}, "--noted 'x' is of the wrong type: give int"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Owner(**wrong)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("graph", [np.eye(3), [(0, 1)], object()])
def test_a_graph_that_is_no_spec_is_told_how_to_be_one(graph: Any) -> None:
    with pytest.raises(UserError, match=r"wrong type: give a spec .* 'links:0-1,1-2,0-2'\.$"):
        Experiment(graph=graph)


def test_numbers_and_paths_become_what_is_wanted() -> None:
    owner = Owner(number=2, count=np.int64(3), folder="runs", data=Path("digits.npz"))  # pyright: ignore[reportArgumentType]
    assert (owner.number, type(owner.number)) == (2, float)
    assert (owner.count, type(owner.count)) == (3, int)
    assert (owner.folder, owner.data) == (Path("runs"), "digits.npz")


def test_only_fields_are_looked_at() -> None:
    assert "family" not in field_kinds(Owner) and field_kinds(Owner)["word"].words == ("a", "b")


def test_a_folder_may_begin_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of --out=~/runs alone."""
    monkeypatch.setenv("HOME", "/home/anna")
    assert Owner(folder="~/runs").folder == Owner(folder=Path("~/runs")).folder == Path("/home/anna/runs")
