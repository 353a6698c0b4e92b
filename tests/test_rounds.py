"""The round loop: how often it looks, what does not change a run, and what stops it."""

import dataclasses
from math import isfinite
from types import SimpleNamespace

import pytest
import torch

from manyheads import rounds, threads
from manyheads.algorithms import DPSGD, DePRL, DisPFL, FedAvg
from manyheads.checkpoint import Checkpoints
from manyheads.errors import Diverged, UserError
from manyheads.record import Record
from manyheads.rounds import run, train
from manyheads.saver import Saver


@pytest.mark.parametrize(("every", "rounds", "expected"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (7, 3, [3])])
def test_rounds_are_evaluated_as_often_as_asked_and_at_the_end(lab, every, rounds, expected):
    runtime = dataclasses.replace(lab.cpu, eval_every=every)
    steps = list(run(dataclasses.replace(lab.opened(lab.tiny(DePRL(), rounds=rounds)), runtime=runtime)))
    assert [step.round for step in steps] == list(range(1, rounds + 1))
    assert [step.round for step in steps if step.record] == expected
    assert all(isfinite(step.loss) for step in steps)


def test_evaluation_changes_nothing(lab):
    often, seldom = (
        list(train(lab.tiny(DePRL(), rounds=4), dataclasses.replace(lab.cpu, eval_every=every)))[-1] for every in (1, 4)
    )
    assert (often.accuracy_mean, often.train_loss, often.bytes_sent_per_worker) == (
        seldom.accuracy_mean,
        seldom.train_loss,
        seldom.bytes_sent_per_worker,
    )


@pytest.mark.parametrize("algorithm", [DePRL(), DPSGD(), DisPFL(), FedAvg()], ids=lambda algorithm: algorithm.name)
def test_threads_and_engines_do_not_change_a_run(lab, algorithm, monkeypatch):
    """Threads not by a bit, although they share the rows of every leaf; the loop to rounding."""
    monkeypatch.setattr(threads, "_LARGE", 1)
    experiment = lab.tiny(algorithm, rounds=2)
    one, two, loop = (
        list(train(experiment, dataclasses.replace(lab.cpu, threads=count, engine=engine)))[-1]
        for count, engine in ((1, "batched"), (2, "batched"), (1, "loop"))
    )
    assert (one.train_loss, one.accuracy_mean, one.consensus_error) == (
        two.train_loss,
        two.accuracy_mean,
        two.consensus_error,
    )
    assert loop.train_loss == pytest.approx(one.train_loss, rel=1e-10)


def test_torch_has_one_thread_in_a_round_and_the_caller_s_between_two(lab, monkeypatch):
    before, inside, looked = torch.get_num_threads(), [], rounds.measure

    def measure(*args):
        inside.append(torch.get_num_threads())
        return looked(*args)

    monkeypatch.setattr(rounds, "measure", measure)
    torch.set_num_threads(2)
    try:
        between = [torch.get_num_threads() for _ in train(lab.tiny(DePRL(), rounds=2), lab.cpu)]
    finally:
        torch.set_num_threads(before)
    assert (inside, between) == ([1, 1], [2, 2])


def test_seconds_are_the_run_s_own(lab, tmp_path, monkeypatch):
    """Looking at a round takes 1 second here, keeping it 10, what the caller does with it 100."""
    now = 0.0

    def taking(seconds, work):
        def timed(*args):
            nonlocal now
            now += seconds
            return work(*args)

        return timed

    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(rounds, "measure", taking(1, rounds.measure))
    monkeypatch.setattr(Saver, "keep", taking(10, Saver.keep))
    runtime, found = dataclasses.replace(lab.cpu, out=tmp_path / "run"), []
    for last in (3, 5):
        for record in train(lab.tiny(DePRL(), rounds=last), runtime):
            found.append(record.seconds)
            now += 100
    assert found == [1, 12, 23, 24, 35], "of a resumed run from its checkpoint on, which says 23"


class Poison:
    """An engine that spoils one worker's loss from some round on."""

    def __init__(self, engine, worker: int, round: int, stream: str) -> None:
        self.engine, self.worker, self.round, self.stream = engine, worker, round, stream

    def fit(self, params, buffers, phase, round, *, workers=None):
        if round >= self.round and phase.stream == self.stream:
            params = {name: leaf.clone() for name, leaf in params.items()}
            for leaf in params.values():
                leaf[self.worker] = float("nan")
        return self.engine.fit(params, buffers, phase, round, workers=workers)

    def evaluate(self, *args):
        return self.engine.evaluate(*args)


@pytest.mark.parametrize("stream", ["head", "body"])
def test_a_loss_that_is_no_number_stops_the_run(lab, tmp_path, stream):
    """Worker, round and phase are named, and what was good is kept."""
    experiment = lab.tiny(DePRL(), rounds=4)
    session = lab.opened(experiment)
    runtime = dataclasses.replace(lab.cpu, out=tmp_path / "run", checkpoint_every=1)
    ctx = dataclasses.replace(session.ctx, engine=Poison(session.ctx.engine, worker=2, round=2, stream=stream))
    steps = run(dataclasses.replace(session, runtime=runtime, ctx=ctx))
    finished = [next(steps).round, next(steps).round]
    with pytest.raises(UserError, match=rf"worker 2 .* round 3, phase '{stream}'") as error:
        next(steps)
    assert "\n" not in str(error.value)
    assert "train with a lower --head-lr or --lr (now 0.05 and 0.1), or a lower --clip" in str(error.value)
    assert str(error.value).endswith("; the checkpoint of round 2 is kept.")
    assert finished == [1, 2]
    kept, _ = Checkpoints(
        runtime.out / "checkpoint", run_id=session.experiment.run_id, num_workers=4, workers=range(4)
    ).load()
    assert kept is not None and kept.round == 2
    assert all(leaf.isfinite().all() for leaf in kept.params.values())
    assert not (runtime.out / "summary.json").exists()


@pytest.mark.parametrize("order", ["train-mix", "mix-train"])
def test_what_mixing_has_spoilt_is_not_put_down_to_rates_alone(lab, order):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Spoiling(DPSGD):
        name = title = "spoiling"

        def mix(self, state, round, ctx):
            spoilt = {name: leaf.clone() for name, leaf in state.params.items()}
            if round == 1:
                spoilt["head.fc2.bias"][3] /= 0.0
            return dataclasses.replace(state, params=spoilt)

    begun = 3 if order == "train-mix" else 2
    with pytest.raises(Diverged) as error:
        list(train(lab.tiny(Spoiling(order=order), rounds=4), lab.cpu))
    assert f"worker 3 is not a number in round {begun}, phase 'body', and its weights were not finite" in str(
        error.value
    )
    assert "before it trained: look at what init and mix of spoiling give, or train with a lower --lr" in str(
        error.value
    )


def test_rates_that_explode_stop_the_run_before_anything_bad_is_kept(lab, tmp_path):
    """The step that blows up is the last of its round: its own loss was fine, the loss after it is not."""
    experiment = lab.tiny(DPSGD(steps=1), lr=1e200, clip=0.0, rounds=3)
    runtime = dataclasses.replace(lab.cpu, out=tmp_path / "run", checkpoint_every=1)
    records: list[Record] = []
    advice = r"train with a lower --lr \(now 1e\+200\), or a --clip\.$"
    with pytest.raises(UserError, match=f"worker 0 is not a number in round 1, train loss: {advice}"):
        records.extend(train(experiment, runtime))
    assert not records
    assert not (runtime.out / "metrics.jsonl").exists() or not (runtime.out / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("size", "suspected"), [(1e30, True), (1.0, False)])
def test_inputs_that_are_too_large_are_suspected_before_rates(lab, size, suspected):
    data = lab.tiny(DPSGD()).data
    data = dataclasses.replace(data, x_train=-size * data.x_train.abs(), x_test=-size * data.x_test.abs())
    with pytest.raises(Diverged, match=r"train with a lower --lr \(now 1e\+200\)") as error:
        list(train(lab.tiny(DPSGD(), data=data, lr=1e200, clip=0.0), lab.cpu))
    assert ("scale x, which goes up to " in str(error.value)) == suspected


class Root(torch.nn.Module):
    """Gives zeros, whose square root has an infinite gradient, or its logarithm."""

    def __init__(self, function) -> None:
        super().__init__()
        self.body, self.head, self.function = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3), function

    def forward(self, x):
        return self.head(self.function(self.body(x).relu() * 0.0))


@pytest.mark.parametrize("function", [torch.sqrt, torch.log], ids=["gradient", "forward"])
@pytest.mark.parametrize("algorithm", [DePRL(), DPSGD()], ids=lambda algorithm: algorithm.name)
def test_what_no_rate_would_mend_is_not_put_down_to_rates(lab, function, algorithm):
    with pytest.raises(Diverged) as error:
        list(train(lab.tiny(algorithm, model=Root(function), head="head", rounds=1), lab.cpu))
    assert "is not a number in round 1, phase '" in str(error.value)
    assert str(error.value).endswith(
        ", and would be none with a learning rate of 0 either: look for what gives NaN or infinity in the net's"
        " forward, its gradient or the loss."
    )


def test_rates_that_the_corollary_sets_are_lowered_by_rounds(lab):
    experiment = lab.tiny(DePRL(), schedule="corollary", rounds=4, lr=None, head_lr=None, decay=None)
    session = lab.opened(experiment)
    ctx = dataclasses.replace(session.ctx, engine=Poison(session.ctx.engine, worker=0, round=0, stream="body"))
    with pytest.raises(UserError, match=r": give more --rounds, .* \(now 1 and 0\.25\), or a lower --clip\.$"):
        list(run(dataclasses.replace(session, ctx=ctx)))


def test_the_directory_is_taken_up_before_the_first_round_and_given_back(lab, tmp_path):
    runtime = dataclasses.replace(lab.cpu, out=tmp_path / "run")
    session, other = (dataclasses.replace(lab.opened(lab.tiny(DePRL(), seed=seed)), runtime=runtime) for seed in (1, 2))
    steps = run(session)
    with pytest.raises(UserError, match="another run is writing"):
        run(session)
    del steps
    with pytest.raises(UserError, match="another experiment"):
        run(other)
    assert [step.round for step in run(session)] == [1, 2]


def test_a_run_that_was_begun_is_continued_and_says_so(lab, tmp_path):
    """Killed before its first round was kept, too."""
    runtime = dataclasses.replace(lab.cpu, out=tmp_path / "run")
    for said in (False, True):
        session = dataclasses.replace(lab.opened(lab.tiny(DePRL(), rounds=2)), runtime=runtime)
        run(session).close()
        assert (f"Continuing the run in {runtime.out} from round 0." in session.notes) == said


def test_python_is_told_by_its_logger_and_nothing_is_printed(lab, caplog, capfd):
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 4).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(4, 3))

    with caplog.at_level("INFO", logger="manyheads"):
        list(train(lab.tiny(DePRL(), model=net), lab.cpu))
    assert any("requires_grad=False: representation.0.weight and 1 more" in message for message in caplog.messages)
    assert capfd.readouterr() == ("", "")


def test_training_is_lazy(lab):
    """A generator: nothing runs before it is asked for, and whoever asks may stop."""
    records = train(lab.tiny(DePRL(), rounds=10**6), lab.cpu)
    assert next(records).round == 1
    assert next(records).round == 2
    records.close()
