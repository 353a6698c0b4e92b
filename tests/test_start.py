"""Where a run goes on: with what it had, in the net it was begun with, and without a second copy of its rows."""

import copy
import shutil
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from manyheads.algorithms import DPSGD, DePRL
from manyheads.algorithms.base import Algorithm, Context, Log, State
from manyheads.algorithms.phases import train_whole
from manyheads.checkpoint import Checkpoints, newest
from manyheads.engine.phase import Steps
from manyheads.errors import UserError
from manyheads.files import locked
from manyheads.jobs import Job
from manyheads.rounds import run, train
from manyheads.saver import Saver
from manyheads.session import Session
from manyheads.start import begin_or_resume, is_finished, open_directory, restore
from manyheads.store import Run, RunDirectory
from manyheads.tree import add_prefix, strip_prefix


def test_a_run_is_taken_up_as_it_was(lab, tmp_path: Path):
    def opened() -> tuple[Session, Saver]:
        session = lab.opened(lab.tiny(DePRL(), rounds=100))
        session = replace(session, runtime=replace(session.runtime, checkpoint_every=1))
        with ExitStack() as held:
            return session, Saver(session, open_directory(session, tmp_path / "run", held))

    session, saver = opened()
    state, traffic = session.experiment.algorithm.init(session.ctx), session.ctx.network.traffic
    traffic.sent += 7
    traffic.on_wire = 5
    saver.keep(1, state, 2.5, 1.5, None)
    again, other = opened()
    start = begin_or_resume(again, other, state)
    assert (start.round, start.seconds, start.simulated_seconds) == (1, 2.5, 1.5)
    assert all(torch.equal(leaf, start.state.params[name]) for name, leaf in state.params.items())
    counted = again.ctx.network.traffic
    assert (counted.sent == traffic.sent).all() and counted.on_wire == 5


@pytest.mark.parametrize(("name", "every", "lost"), [("metrics.jsonl", 1, 1), ("workers.jsonl", 2, 2), ("", 3, None)])
def test_records_that_are_lost_are_missed_when_a_run_goes_on(lab, tmp_path: Path, name: str, every: int, lost):
    runtime = replace(lab.cpu, out=tmp_path / "run", eval_every=every)
    list(train(lab.tiny(DePRL(), rounds=4), runtime))
    if name:
        path = tmp_path / "run" / name
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    list(train(lab.tiny(DePRL(), rounds=5), runtime))
    notes = [note for note in (Run.open(tmp_path / "run").summary() or {})["notes"] if "no records" in note]
    assert notes == ([f"{tmp_path / 'run'} has no records of the rounds after {lost} up to 4."] if name else [])


def test_a_run_goes_on_with_the_samples_it_began_with(lab, tmp_path: Path):
    def trained(out: str, rounds: int, **options) -> Path:
        asked = lab.tiny(DPSGD(), data="digits", split="dirichlet:0.3", rounds=rounds, **options)
        list(train(asked, replace(lab.cpu, out=tmp_path / out)))
        return tmp_path / out / "partition.safetensors"

    mine, others = trained("mine", 1), trained("others", 1, seed=2)
    own = mine.read_bytes()
    mine.write_bytes(others.read_bytes())
    for rounds in (1, 2):
        with pytest.raises(UserError, match=r"partition\.safetensors deals the samples otherwise .*: put the old file"):
            trained("mine", rounds)
    assert mine.read_bytes() == others.read_bytes(), "what was refused is left as it is"
    mine.write_bytes(own)
    trained("mine", 2)
    assert mine.read_bytes() == own
    # Where nothing was trained with them, others are replaced.
    mine.write_bytes(others.read_bytes())
    (mine.parent / "summary.json").unlink()
    shutil.rmtree(mine.parent / "checkpoint")
    trained("mine", 2)
    assert mine.read_bytes() == own


def test_a_restarted_process_waits_for_the_one_before_it_to_leave(lab, tmp_path: Path):
    opened = lab.opened(lab.tiny(DePRL()))
    session: Any = SimpleNamespace(
        ctx=opened.ctx,
        sharers=SimpleNamespace(rank=0, patience=30.0),
        runtime=opened.runtime,
        experiment=opened.experiment,
        everyone=opened.everyone,
        sites=None,
    )
    with ExitStack() as others, ExitStack() as held:
        others.enter_context(locked(tmp_path / "run"))
        threading.Timer(0.2, others.close).start()
        open_directory(session, tmp_path / "run", held)


@pytest.mark.parametrize(("uses_rounds", "cure"), [(False, "give all of them more --rounds"), (True, "begin again")])
def test_sites_of_which_only_some_have_finished_say_how_to_go_on(tmp_path: Path, uses_rounds: bool, cure: str):
    """More rounds are another experiment where its numbers depend on them."""
    session: Any = SimpleNamespace(
        ctx=SimpleNamespace(rounds=3),
        sharers=SimpleNamespace(rank=0),
        processes=SimpleNamespace(total=lambda finished: 1, count=2),
        sites=True,
        experiment=SimpleNamespace(uses_rounds=uses_rounds),
    )
    with pytest.raises(UserError, match=f"other sites have finished the 3 rounds asked for, but this one .*: {cure}"):
        is_finished(session, RunDirectory(tmp_path))


def test_the_rows_that_a_run_goes_on_from_are_let_go(lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runtime, taken = replace(lab.cpu, out=tmp_path / "run"), []
    list(train(lab.tiny(DPSGD(), rounds=1), runtime))

    def watched(session, snapshot, first):
        state = restore(session, snapshot, first)
        taken.extend(weakref.ref(leaf) for leaf in state.params.values())
        return state

    monkeypatch.setattr("manyheads.start.restore", watched)
    steps = run(replace(lab.opened(lab.tiny(DPSGD(), rounds=3)), runtime=runtime))
    assert next(steps).round == 2
    assert taken and not any(leaf() is not None for leaf in taken)


def test_a_run_is_not_continued_with_another_net(lab, tmp_path: Path):
    """A factory counts by its name, whatever it makes."""
    first = torch.nn.Linear(6, 4)

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(copy.deepcopy(first), torch.nn.ReLU(), torch.nn.Linear(first.out_features, 3))

    experiment, runtime = lab.tiny(DePRL(), model=net), replace(lab.cpu, out=tmp_path / "run")
    list(train(experiment, runtime))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for first in (torch.nn.Linear(6, 5), torch.nn.Linear(6, 4).requires_grad_(False)):  # noqa: B007 (the net's)
        with pytest.raises(UserError, match=r"begun with another net \(representation\.0\.weight differs\)"):
            list(train(replace(experiment, rounds=9), runtime))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@dataclass(frozen=True, kw_only=True)
class Members(Algorithm):
    """Two copies of the net, and no net beside them."""

    name: ClassVar[str] = "members"
    title: ClassVar[str] = "Members"

    def init(self, ctx: Context) -> State:
        pair = [add_prefix(ctx.initial.params, f"member{k}") for k in range(2)]
        return State({**pair[0], **pair[1]}, ctx.initial.buffers)

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        moved, log = train_whole(self.models(state, ctx), round, ctx, Steps(1), None)
        return State({**state.params, **add_prefix(moved.params, "member0")}, moved.buffers), log

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.mix(state, {"member0"}, round)

    def models(self, state: State, ctx: Context) -> State:
        return State(strip_prefix(state.params, "member0"), state.buffers)


def test_a_state_need_not_hold_the_net_itself(lab, tmp_path: Path):
    long, short = lab.tiny(Members(), rounds=3), lab.tiny(Members(), rounds=1)
    straight, broken = (replace(lab.cpu, out=tmp_path / name) for name in ("straight", "broken"))
    list(train(long, straight))
    list(train(short, broken))
    assert [record.round for record in train(long, broken)] == [2, 3]
    whole, resumed = (
        Run.open(runtime.out, algorithm=Members(), data=long.data).state() for runtime in (straight, broken)
    )
    assert all(torch.equal(leaf, resumed.params[name]) for name, leaf in whole.params.items())


class _Wide(torch.nn.Module):
    """A net whose layer ``extra`` can be left out, and which can be made wider."""

    def __init__(self, width: int = 5, *, extra: bool = True) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, width)
        if extra:
            self.extra = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.extra(self.first(x)) if "extra" in self._modules else self.first(x)))


def test_a_continuation_that_is_refused_leaves_a_finished_run_finished(lab, tmp_path: Path):
    """The code of a factory may be the same and the net that it makes another."""
    options: dict[str, object] = {}
    kind = lab.tiny(DPSGD(), rounds=1, model=lambda: _Wide(**options), head="head")
    runtime = replace(lab.cpu, out=tmp_path / "run")
    list(train(kind, runtime))
    for changed, differs in (({"width": 7}, "first.weight"), ({"extra": False}, "extra.weight")):
        options.update(changed)
        with pytest.raises(UserError, match=rf"another net \(representation\.{differs} differs\): put it back"):
            list(train(replace(kind, rounds=3), runtime))
        assert Run.open(tmp_path / "run").finished
        options.clear()


def test_weights_of_another_type_are_another_net(lab, tmp_path: Path):
    experiment, runtime = lab.tiny(DPSGD(), rounds=1), replace(lab.cpu, out=tmp_path)
    list(train(experiment, runtime))
    manifest, _ = newest(tmp_path / "checkpoint")
    assert manifest is not None
    everyone = range(manifest.num_workers)
    kept = Checkpoints(tmp_path / "checkpoint", run_id=manifest.run_id, num_workers=len(everyone), workers=everyone)
    state, _ = kept.load()
    assert state is not None
    kept.write_rows(replace(state, params={name: leaf.half() for name, leaf in state.params.items()}))
    kept.complete(state.round, state.seconds)
    with pytest.raises(UserError, match=r"another net \(representation\..* differs\): put it back"):
        list(train(replace(experiment, rounds=3), runtime))


def test_a_mistake_of_an_algorithm_is_told_before_anything_is_written(lab, tmp_path: Path):
    @dataclass(frozen=True, kw_only=True)
    class Misspelt(DPSGD):
        name: ClassVar[str] = "misspelt"
        title: ClassVar[str] = "Misspelt"
        private: ClassVar[frozenset[str]] = frozenset({"haed"})

    with pytest.raises(UserError, match="haed"):
        list(train(lab.tiny(Misspelt(), rounds=1), replace(lab.cpu, out=tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_an_extension_that_was_stopped_is_unfinished_until_fewer_rounds_are_asked_for_again(lab, tmp_path: Path):
    """Whoever asks is told the same: the command that extends it, a comparison, and those who read it."""
    short, out = lab.tiny(DPSGD(), rounds=2), tmp_path / "run"
    runtime = replace(lab.cpu, out=out, checkpoint_every=100)
    list(train(short, runtime))
    steps = train(replace(short, rounds=9), runtime)
    assert [next(steps).round, next(steps).round] == [3, 4]
    steps.close()
    assert not Run.open(out).finished and not Job(short, out, "short").finished
    assert list(train(short, runtime)) == []
    assert Run.open(out).finished and [row["round"] for row in Run.open(out).metrics()] == [1, 2]
    assert [record.round for record in train(replace(short, rounds=3), runtime)] == [3]


def test_an_extension_that_is_kept_cannot_be_taken_back(lab, tmp_path: Path):
    short, runtime = lab.tiny(DPSGD(), rounds=2), replace(lab.cpu, out=tmp_path / "run", checkpoint_every=1)
    list(train(short, runtime))
    steps = train(replace(short, rounds=9), runtime)
    next(steps), next(steps)
    steps.close()
    with pytest.raises(UserError, match=r"has reached round [34], beyond --rounds 2: give at least [34]"):
        list(train(short, runtime))
