"""The phase language: what a phase refuses to be, and loss and metric by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from manyheads.engine.phase import SGD, Epochs, Phase, Progress, Steps, accuracy, cross_entropy, single_head
from manyheads.errors import UserError

PARAMS = {"representation.w": torch.zeros(4, 2), "head.w": torch.zeros(4, 3)}


def phase(**changes: Any) -> Phase:
    usual = {"stream": "body", "update": {"representation", "head"}, "amount": Steps(1), "optimizer": SGD(0.1)}
    return Phase(**{**usual, "objective": single_head(cross_entropy), **changes})


@pytest.mark.parametrize("kind", [Epochs, Steps])
def test_an_amount_can_be_come_to_the_end_of(kind: type[Epochs | Steps]):
    assert Epochs(1) != Steps(1)
    assert kind(0).count == 0 and kind(np.int64(2)).count == 2  # pyright: ignore[reportArgumentType]
    for given in (-1, 1.5, "2"):
        with pytest.raises(UserError, match=rf"{kind.__name__}\({given!r}\) is not an amount .*: give a whole number"):
            kind(given)  # pyright: ignore[reportArgumentType]


WRONG = {
    r"update of a phase 'head' is of the wrong type: give a frozenset such as": {"update": "head"},
    r"amount of a phase 3 is of the wrong type: give Epochs or Steps": {"amount": 3},
    r"optimizer of a phase 0\.1 is of the wrong type: give SGD": {"optimizer": 0.1},
    r"objective of a phase None is of the wrong type: give a function": {"objective": None},
    r"unknown frozen of a phase 'evaluate'\. Did you mean 'eval'": {"frozen": "evaluate"},
    r"proximal of a phase must be an anchor .* as in \(state\.params, 0\.1\)": {"proximal": PARAMS},
    r"proximal of a phase must be an anchor and its strength: ": {"proximal": (0.1, PARAMS)},
}


@pytest.mark.parametrize("says", WRONG)
def test_a_phase_is_made_of_what_engines_can_run(says: str):
    with pytest.raises(UserError, match=says):
        phase(**WRONG[says])


APART = {
    r"proximal of a phase has nothing for head\.w, but the workers have \[4, 3\]: give each": {
        "proximal": ({"representation.w": torch.zeros(4, 2)}, 0.1)
    },
    r"proximal of a phase has \[1, 2\] for representation\.w": {
        "proximal": ({name: leaf[:1] for name, leaf in PARAMS.items()}, 0.1)
    },
    r"mask of a phase has \[4\] for heda\.w, but the workers have nothing": {"mask": {"heda.w": torch.ones(4)}},
    r"constants of a phase has \[9, 3\] for c: give .* a row for each of the 4 workers here": {
        "constants": {"c": torch.ones(9, 3)}
    },
    r"constants of a phase has 0\.5 for c": {"constants": {"c": 0.5}},
}


@pytest.mark.parametrize("says", APART)
def test_what_a_phase_holds_of_the_workers_is_as_their_leaves_are(says: str):
    with pytest.raises(UserError, match=says):
        phase(**APART[says]).check_rows(PARAMS, 4)


def test_a_phase_may_hold_less_than_there_is():
    held = {"mask": {"head.w": torch.ones(4, 3)}, "constants": {"c": torch.ones(4)}}
    phase(update={"head"}, proximal=({"head.w": torch.ones(4, 3)}, 0.1), **held).check_rows(PARAMS, 4)


def test_cross_entropy_is_per_sample():
    scores = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.stack([scores[0].exp().sum().log() - 2.0, torch.tensor(3.0, dtype=torch.float64).log()])
    torch.testing.assert_close(cross_entropy(scores, torch.tensor([1, 2])), expected)


def test_accuracy_is_per_sample():
    scores = torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 0.0]], dtype=torch.float64)
    assert accuracy(scores, torch.tensor([1, 2])).tolist() == [1.0, 0.0]
    assert accuracy(scores, torch.tensor([1, 2])).dtype == torch.float64


def test_single_head_reads_the_head():
    scores = torch.randn(4, 3)
    y = torch.tensor([0, 1, 2, 0])
    outputs = {"generic": -scores, "head": scores, "other": -scores}
    assert torch.equal(single_head(cross_entropy)(outputs, y, {}), cross_entropy(scores, y))


def test_a_phase_that_is_over_is_not_going_on():
    assert str(Progress()) == str(Progress(82, 82)) == ""
    assert str(Progress(1000, 8200)) == "1,000 of 8,200 mini-batches"
