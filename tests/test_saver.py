"""When a run is kept: as often as asked for, or as its share of the time allows; and taken up as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyheads.algorithms import DePRL
from manyheads.checkpoint import latest_round
from manyheads.saver import Saver, restore
from manyheads.store import RunDirectory


@pytest.fixture
def made(lab, tmp_path: Path):
    """A saver of a run of a hundred rounds, and its first state."""

    def make(**runtime: object) -> tuple[Saver, object]:
        session = lab.opened(lab.tiny(DePRL(), rounds=100))
        session = replace(session, runtime=replace(session.runtime, **runtime))
        directory = RunDirectory.open(tmp_path / "run", session.experiment, resume=False)
        return Saver(session, directory), session.experiment.algorithm.init(session.ctx)

    return make


def kept(saver: Saver) -> int:
    return latest_round(saver.directory.path / "checkpoint")


def test_checkpoints_take_a_twentieth_of_the_time(made):
    saver, state = made()
    saver.next_cost = 1.0
    saver.keep(1, state, 19.9, 0.0, None)
    assert kept(saver) == 0
    saver.keep(2, state, 20.1, 0.0, None)
    assert kept(saver) == 2
    assert 0 < saver.spent < 1, "what it really took is counted, not the guess"
    saver.spent = saver.next_cost = 1.0
    saver.keep(3, state, 39.9, 0.0, None)
    assert kept(saver) == 2
    saver.keep(4, state, 40.1, 0.0, None)
    assert kept(saver) == 4


def test_checkpoints_are_written_as_often_as_asked_for(made):
    saver, state = made(checkpoint_every=3)
    found = []
    for round in range(1, 8):
        saver.keep(round, state, 1e-9, 0.0, None)
        found.append(kept(saver))
    assert found == [0, 0, 3, 3, 3, 6, 6]


def test_a_run_is_taken_up_as_it_was(made):
    saver, state = made(checkpoint_every=1)
    traffic = saver.session.ctx.network.traffic
    traffic.sent += 7
    traffic.on_wire = 5
    saver.keep(1, state, 2.5, 1.5, None)
    other, _ = made()
    snapshot, notes = other.load()
    assert snapshot is not None and notes == []
    assert (snapshot.round, snapshot.seconds, snapshot.simulated_seconds) == (1, 2.5, 1.5)
    again = restore(other.session, snapshot)
    assert all(torch.equal(leaf, again.params[name]) for name, leaf in state.params.items())
    counted = other.session.ctx.network.traffic
    assert (counted.sent == traffic.sent).all() and counted.on_wire == 5
