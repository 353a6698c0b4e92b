"""New workers: they take the representation as it was learned, train heads alone, and hold data of their own."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from manyheads.algorithms import DPSGD, REGISTRY, Algorithm, DePRL, Join, State
from manyheads.data import federate, load
from manyheads.data.arrays import from_arrays
from manyheads.data.pixels import Pixels
from manyheads.engine.phase import accuracy
from manyheads.errors import UserError
from manyheads.experiment import Experiment, flat
from manyheads.new_workers import Learned, NewWorkers, join, open_join, open_join_from
from manyheads.rounds import run, train
from manyheads.session import Session
from manyheads.store import Run
from manyheads.store.layout import EXPERIMENT, MODEL
from manyheads.tree import select

BODY = {"representation"}


def _trained(lab: SimpleNamespace, folder: Path, name: str = "deprl", **changes: object) -> Run:
    """A finished run of four workers."""
    experiment = lab.tiny(REGISTRY[name](), **{"split": "iid", **changes})
    for _ in run(lab.opened_in(experiment, folder)):
        pass
    return Run.open(folder, data=experiment.data)


@pytest.fixture
def lab(lab: SimpleNamespace) -> SimpleNamespace:
    from manyheads.session import open_session

    def opened_in(experiment: Experiment, folder: Path) -> Session:
        return open_session(experiment, replace(lab.cpu, out=folder))

    return SimpleNamespace(**vars(lab), opened_in=opened_in)


@pytest.mark.parametrize("schedule", ["decay", "corollary"])
def test_heads_train_at_the_runs_first_rate_in_every_pass(lab: SimpleNamespace, tmp_path: Path, schedule: str) -> None:
    rates = {"decay": 0.5, "lr": 0.2, "head_lr": 0.3} if schedule == "decay" else dict.fromkeys(("lr", "head_lr"))
    source = _trained(lab, tmp_path / "run", schedule=schedule, **{"decay": None, **rates})
    session = open_join(source, NewWorkers(workers=4), lab.cpu)
    wanted = source.experiment.recipe.head_lr
    assert [session.ctx.rates.sgd(round, head=True).lr for round in (0, 1, 9)] == [wanted] * 3
    session = open_join(source, NewWorkers(workers=4, head_lr=0.7), lab.cpu)
    assert [session.ctx.rates.sgd(round, head=True).lr for round in (0, 1, 9)] == [0.7] * 3


def test_what_is_learned_is_the_same_from_memory_as_from_disk(lab: SimpleNamespace, tmp_path: Path) -> None:
    """With statistics, which belong to the representation."""
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()
    experiment = lab.tiny(REGISTRY["deprl"](), split="iid", model=module, head="2")
    found: list[Learned] = []
    session = lab.opened_in(experiment, tmp_path / "run")
    list(run(session, lambda state: found.append(Learned.from_session(session, state, str(tmp_path / "run")))))
    source = Run.open(tmp_path / "run", data=experiment.data, model=module)
    both = open_join(source, NewWorkers(workers=3), lab.cpu), open_join_from(found[0], NewWorkers(workers=3), lab.cpu)
    assert both[0].experiment == both[1].experiment and both[0].notes == both[1].notes
    first, second = ({**one.ctx.initial.params, **one.ctx.initial.buffers} for one in both)
    assert first.keys() == second.keys() and any("running_mean" in name for name in first)
    for name, leaf in first.items():
        assert torch.equal(leaf, second[name]), name


def test_new_workers_whose_loss_explodes_are_told_whose_rate_it_is(lab: SimpleNamespace, tmp_path: Path) -> None:
    source = _trained(lab, tmp_path / "run", "d-psgd", head_lr=1e200, clip=0.0)
    with pytest.raises(UserError, match=r": train with a lower --head-lr \(now 1e\+200\), or a --clip\.$"):
        list(join(source, NewWorkers(workers=4), lab.cpu))


def test_new_workers_are_there_in_every_pass_and_in_the_devices_precision(lab: SimpleNamespace, tmp_path: Path) -> None:
    """Whoever was away in the run, and whatever a GPU computed it in."""
    failing = {"precision": "float32", "worker_failure": 0.6, "link_failure": 0.6}
    source = _trained(lab, tmp_path / "run", **failing)
    described = json.loads((tmp_path / "run" / EXPERIMENT).read_text())
    (tmp_path / "run" / EXPERIMENT).write_text(json.dumps({**described, "precision": "tf32"}))
    source = Run.open(tmp_path / "run", data=source.experiment.data)
    assert source.experiment.precision == "tf32"
    session = open_join(source, NewWorkers(workers=4, representation="mean"), lab.cpu)
    assert session.experiment.precision == "float32"
    assert {leaf.dtype for leaf in session.ctx.initial.params.values()} == {torch.float32}
    assert session.experiment.link_failure == 0 and all(session.mixing.rows(k).present.all() for k in range(10))


def test_one_new_worker_is_enough(lab: SimpleNamespace, tmp_path: Path) -> None:
    *_, last = join(_trained(lab, tmp_path / "run"), NewWorkers(workers=1, head_epochs=2), lab.cpu)
    assert last.round == 2 and last.consensus_error == 0 and 0 <= last.accuracy_mean <= 1


@pytest.mark.parametrize("representation", ["own", "mean"])
def test_heads_alone_are_trained_on_what_was_learned(lab: SimpleNamespace, tmp_path: Path, representation: str) -> None:
    source = _trained(lab, tmp_path / "run")
    new = NewWorkers(workers=6, representation=representation, head_epochs=4)  # pyright: ignore[reportArgumentType]
    session = open_join(source, new, replace(lab.cpu, out=tmp_path / "new"))
    learned = select(source.state().params, BODY)
    first = session.experiment.algorithm.init(session.ctx)
    for name, leaf in learned.items():
        wanted = leaf[torch.arange(6) % 4] if representation == "own" else leaf.mean(0).expand(6, *leaf.shape[1:])
        assert torch.allclose(first.params[name], wanted, rtol=0, atol=1e-15)

    records = [step.record for step in run(session)]
    assert [record.round for record in records if record] == [1, 2, 3, 4]
    assert all(record is not None and record.bytes_sent_per_worker == 0 for record in records)
    assert records[-1] is not None and records[0] is not None
    assert records[-1].train_loss < records[0].train_loss
    after = Run.open(tmp_path / "new").state().params
    for name, leaf in first.params.items():
        assert torch.equal(after[name], leaf) == name.startswith("representation."), name


def test_a_process_gives_its_own_workers_theirs(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _trained(lab, tmp_path / "run")
    monkeypatch.setattr("manyheads.derived.federate", lambda *a, **k: federate(*a, **k).take([5, 2]))
    session = open_join(source, NewWorkers(workers=6), lab.cpu)
    assert session.ctx.ids == (5, 2)
    for name, leaf in select(source.state().params, BODY).items():
        assert torch.equal(session.ctx.initial.params[name], leaf[[1, 2]])


def test_heads_start_fresh_and_samples_are_dealt_anew(lab: SimpleNamespace, tmp_path: Path) -> None:
    source = _trained(lab, tmp_path / "run")
    session = open_join(source, NewWorkers(workers=4), lab.cpu)
    heads = select(session.ctx.initial.params, {"head"})
    for name, leaf in select(source.state().params, {"head"}).items():
        assert not torch.equal(heads[name], leaf)
    before = lab.opened(source.experiment)
    assert lab.held(session.everyone) != lab.held(before.everyone)
    # The run's seed is the default.
    seeds = (source.experiment.seed, 0, 2)
    again = [lab.held(open_join(source, NewWorkers(workers=4, seed=seed), lab.cpu).everyone) for seed in seeds]
    assert again[0] == lab.held(session.everyone)
    assert len(set(again)) == 3
    assert session.experiment.seed == source.experiment.seed, "what is drawn differs, not what is said"


def test_what_is_joined_names_the_run(lab: SimpleNamespace, tmp_path: Path) -> None:
    source = _trained(lab, tmp_path / "run")
    five = NewWorkers(workers=5)
    one = open_join(source, five, lab.cpu).experiment
    assert (one.workers, one.rounds, one.algorithm.name) == (5, 10, "join")
    assert isinstance(one.algorithm, Join) and one.algorithm.learned_by == "deprl"
    name = f"{replace(source.experiment, seed=0).run_id}-{source.experiment.rounds}"
    assert one.algorithm.teacher == name, "one for all seeds of a run, but not for all of its rounds"
    assert open_join(source, five, lab.cpu).experiment == one
    assert open_join(source, replace(five, representation="mean"), lab.cpu).experiment.run_id != one.run_id
    longer = _trained(lab, tmp_path / "run", data=source.experiment.data, rounds=7)
    assert longer.experiment.run_id == source.experiment.run_id
    assert open_join(longer, five, lab.cpu).experiment.run_id != one.run_id


def test_what_is_joined_is_what_was_learned(lab: SimpleNamespace, tmp_path: Path) -> None:
    """Runs of the same name, trained on other machines, may end with other weights."""
    source = _trained(lab, tmp_path / "run")
    session = lab.opened(source.experiment)
    state = source.state()

    def joined(factor: float) -> Experiment:
        params = {name: factor * leaf for name, leaf in state.params.items()}
        learned = Learned.from_session(session, State(params, state.buffers), "run")
        return open_join_from(learned, NewWorkers(workers=3), lab.cpu).experiment

    assert joined(1).run_id == joined(1).run_id != joined(2).run_id


@pytest.mark.parametrize("name", ["ditto", "fedrod", "fedavg", "dispfl"])
def test_the_shared_part_of_every_algorithm_can_be_joined(lab: SimpleNamespace, tmp_path: Path, name: str) -> None:
    source = _trained(lab, tmp_path / "run", name)
    session = open_join(source, NewWorkers(workers=5, head_epochs=1), replace(lab.cpu, out=tmp_path / "new"))
    assert session.ctx.model.groups == ("representation", "head")
    for name_, leaf in select(source.state().params, BODY).items():
        assert torch.equal(session.ctx.initial.params[name_][4], leaf[0])
    assert len(list(run(session))) == 1
    assert Run.open(tmp_path / "new", data=source.experiment.data).model(4) is not None


def test_who_brings_data_need_not_have_the_runs(lab: SimpleNamespace, tmp_path: Path) -> None:
    _trained(lab, tmp_path / "run")
    elsewhere = Run.open(tmp_path / "run")
    *_, last = join(elsewhere, NewWorkers(data=lab.blobs(), workers=1, head_epochs=1), lab.cpu)
    assert last.round == 1
    with pytest.raises(UserError, match=r"data is arrays.*give it in Python"):
        open_join(elsewhere, NewWorkers(workers=2), lab.cpu)


def test_data_that_have_changed_under_their_name(lab: SimpleNamespace, tmp_path: Path) -> None:
    runtime = replace(lab.cpu, data_dir=tmp_path, out=tmp_path / "run")
    x, y = np.random.default_rng(0).normal(size=(60, 900)), np.arange(60) % 6
    np.savez(tmp_path / "mobiact6.npz", x=x, y=y)
    before = load("mobiact", tmp_path)
    list(train(Experiment(data="mobiact", model="mlp:4", workers=2, rounds=1), runtime))
    assert open_join(Run.open(tmp_path / "run"), NewWorkers(workers=2), runtime)
    np.savez(tmp_path / "mobiact6.npz", x=x + np.arange(900), y=y)
    with pytest.raises(
        UserError, match=r"was not trained on the data that mobiact holds now: put the old data back, or give"
    ):
        open_join(Run.open(tmp_path / "run"), NewWorkers(workers=2), runtime)
    assert open_join(Run.open(tmp_path / "run", data=before), NewWorkers(workers=2), runtime), "data given in Python"


def test_new_workers_keep_the_samples_they_bring(lab: SimpleNamespace, tmp_path: Path) -> None:
    source, data = _trained(lab, tmp_path / "run"), lab.blobs()
    own = replace(data, brought_by_workers=True)
    for given, asked, split in ((None, None, "iid"), (data, None, "iid"), (own, None, "natural"), (own, "iid", "iid")):
        new = NewWorkers(data=given, split=asked, workers=4)
        assert open_join(source, new, lab.cpu).experiment.split == split


def test_a_newcomer_with_a_data_set_joins_workers_who_brought_their_own(lab: SimpleNamespace, tmp_path: Path) -> None:
    source = _trained(lab, tmp_path / "run", data=replace(lab.blobs(), brought_by_workers=True), split=None)
    theirs = replace(lab.blobs(), user_train=None, user_test=None)
    session = open_join(source, NewWorkers(data=theirs, workers=1), lab.cpu)
    assert session.everyone.train.sizes == (len(theirs.x_train),)
    with pytest.raises(UserError, match=r"does not say whose its samples are: give --workers 1, who has them"):
        open_join(source, NewWorkers(data=theirs, workers=3), lab.cpu)
    for data, split in ((theirs, "iid"), (lab.blobs(), None)):
        assert open_join(source, NewWorkers(data=data, split=split, workers=3), lab.cpu).experiment.workers == 3


def test_the_representation_is_frozen_as_in_the_run_unless_they_say_otherwise(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    def mode(algorithm: Algorithm, **new: Any) -> str:
        experiment = lab.tiny(algorithm, split="iid")
        folder = tmp_path / experiment.run_id
        for _ in run(lab.opened_in(experiment, folder)):
            pass
        session = open_join(Run.open(folder, data=experiment.data), NewWorkers(workers=4, **new), lab.cpu)
        return session.experiment.algorithm.frozen

    assert (mode(DePRL()), mode(DePRL(frozen="eval")), mode(DPSGD())) == ("train", "eval", "train")
    assert (mode(DePRL(frozen="eval"), frozen="train"), mode(DPSGD(), frozen="eval")) == ("train", "eval")


def test_statistics_come_along(lab: SimpleNamespace, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()
    _trained(lab, tmp_path / "run", model=module)
    source = Run.open(tmp_path / "run", data=lab.blobs(), model=module)
    session = open_join(source, NewWorkers(workers=5, representation="mean", head_epochs=1), lab.cpu)
    buffers = source.state().buffers
    floats = {name: leaf for name, leaf in buffers.items() if leaf.is_floating_point()}
    assert floats
    for name, leaf in floats.items():
        assert torch.allclose(session.ctx.initial.buffers[name], leaf.mean(0).expand(5, *leaf.shape[1:]))
    for name in buffers.keys() - floats.keys():
        assert session.ctx.initial.buffers[name].tolist() == [buffers[name][0]] * 5 != [0] * 5, "batches that were seen"


def test_new_samples_are_made_of_bytes_as_the_first_were(lab: SimpleNamespace, tmp_path: Path) -> None:
    recorded = np.random.default_rng(0).integers(0, 256, (60, 6), dtype=np.uint8)
    y = np.arange(60) % 3
    taken, inputs = from_arrays(recorded, y), from_arrays(recorded / 255, y)
    other = replace(taken, pixels=Pixels(mean=[0.5], std=[0.2]))
    by_bytes = _trained(lab, tmp_path / "bytes", data=taken)
    by_numbers = _trained(lab, tmp_path / "numbers", data=inputs)
    for given in (taken, inputs):
        open_join(by_bytes, NewWorkers(data=given, workers=5), lab.cpu)
    open_join(by_numbers, NewWorkers(data=inputs, workers=5), lab.cpu)
    for source, given, message in (
        (by_bytes, from_arrays(recorded.astype(int), y), r"take bytes as byte / 255, but x of arrays goes up to 255: "),
        (
            by_bytes,
            other,
            r"take bytes as byte / 255, those of arrays become \(byte / 255 - mean\) / std with mean 0.5 ",
        ),
        (by_numbers, taken, "x of arrays holds bytes, but the nets of .*numbers were not trained on bytes: "),
    ):
        with pytest.raises(UserError, match=message):
            open_join(source, NewWorkers(data=given, workers=5), lab.cpu)


def test_mistakes(lab: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--head-epochs 0 is not positive"):
        NewWorkers(head_epochs=0)
    with pytest.raises(UserError, match="--head-epochs '2' is of the wrong type: give int"):
        NewWorkers(head_epochs="2")  # pyright: ignore[reportArgumentType]
    source = _trained(lab, tmp_path / "run")
    wide = lab.blobs()
    wide = replace(wide, x_train=wide.x_train.repeat(1, 2), x_test=wide.x_test.repeat(1, 2))
    with pytest.raises(
        UserError, match=r"samples are \[12\], but the nets of .* take \[6\]: give --data of that shape"
    ):
        open_join(source, NewWorkers(data=wide, workers=5), lab.cpu)
    for head, message in (("all", "has learned no representation"), ("none", "have no head")):
        with pytest.raises(UserError, match=message):
            open_join(_trained(lab, tmp_path / head, head=head), NewWorkers(workers=5), lab.cpu)
    for folder in ("half", "run"):  # of the second it is a continuation that is not finished
        steps = run(lab.opened_in(lab.tiny(REGISTRY["deprl"](), rounds=9, split="iid"), tmp_path / folder))
        next(steps)
        steps.close()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(UserError, match="is not finished"):
            open_join(Run.open(tmp_path / folder, data=lab.blobs()), NewWorkers(), lab.cpu)
    with pytest.raises(UserError, match=r"str is not a Run: give manyheads\.Run\.open\(path\)"):
        next(join(str(tmp_path / "run")))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"int is not NewWorkers: give manyheads\.NewWorkers\(\.\.\.\)"):
        next(join(Run.open(tmp_path / "run"), 8))  # pyright: ignore[reportArgumentType]


def test_from_python_new_workers_are_records_too(lab: SimpleNamespace, tmp_path: Path) -> None:
    """Of a run whose arrays and net only Python can give."""
    source = _trained(lab, tmp_path / "run")
    found = list(join(source, NewWorkers(workers=6, head_epochs=3), replace(lab.cpu, out=tmp_path / "new")))
    assert (
        [record.round for record in found]
        == [1, 2, 3]
        == [row["round"] for row in Run.open(tmp_path / "new").metrics()]
    )
    assert found[-1].train_loss < found[0].train_loss
    # For reports on several runs that were joined.
    teacher = (Run.open(tmp_path / "new").summary() or {})["teacher"]
    assert teacher == flat(source.description)


def test_layers_that_are_not_trained_are_the_runs(lab: SimpleNamespace, tmp_path: Path) -> None:
    def held() -> torch.nn.Module:
        layers = [torch.nn.Linear(6, 5).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(5, 4)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(4, 3))

    experiment = lab.tiny(REGISTRY["deprl"](), split="iid", model=held)
    for _ in run(lab.opened_in(experiment, tmp_path / "run")):
        pass
    source = Run.open(tmp_path / "run", data=experiment.data, model=held)
    session = open_join(source, NewWorkers(workers=3, head_epochs=1), replace(lab.cpu, out=tmp_path / "new"))
    constants = source.constants()
    assert constants.keys() == {"representation.0.weight", "representation.0.bias"}
    work = session.ctx.engine.work
    assert all(torch.equal(work.model.get_buffer(name), leaf) for name, leaf in constants.items()), "it trains on them"
    *_, last = run(session)
    new = Run.open(tmp_path / "new", data=experiment.data, model=held)
    assert all(torch.equal(new.constants()[name], leaf) for name, leaf in constants.items())
    shards = session.federation.test
    scores = [
        accuracy(new.model(worker)(shards.x[shards.index[shards.rows(worker)]]), shards.y[shards.rows(worker)]).mean()
        for worker in range(3)
    ]
    assert last.record is not None and last.record.accuracy_mean == pytest.approx(torch.stack(scores).mean().item())
    trained = Run.open(tmp_path / "run", data=experiment.data, model=lambda: held().requires_grad_(True))
    with pytest.raises(UserError, match="requires_grad=False do not fit this model and data"):
        open_join(trained, NewWorkers(workers=3), lab.cpu)


def test_new_heads_on_a_representation_that_nobody_has_trained(lab: SimpleNamespace, tmp_path: Path) -> None:
    scale = 1.0

    def probed() -> torch.nn.Module:
        held = torch.nn.Linear(6, 5).requires_grad_(False)
        held.weight *= scale
        return torch.nn.Sequential(held, torch.nn.ReLU(), torch.nn.Linear(5, 3))

    joined = []
    for scale in (1.0, 2.0):
        experiment = lab.tiny(REGISTRY["local"](), split="iid", model=probed)
        for _ in run(lab.opened_in(experiment, tmp_path / f"{scale}")):
            pass
        source = Run.open(tmp_path / f"{scale}", data=experiment.data, model=probed)
        joined.append(open_join(source, NewWorkers(workers=3, head_epochs=2), lab.cpu))
        *_, last = run(joined[-1])
        assert last.round == 2
    # What was learned is the same, nothing, and yet it is another representation.
    one, other = (session.experiment for session in joined)
    assert isinstance(one.algorithm, Join) and isinstance(other.algorithm, Join)
    assert one.algorithm.teacher == other.algorithm.teacher and one.run_id != other.run_id


@pytest.mark.parametrize(
    ("held", "representation", "said"),
    [
        ({}, "own", ": of worker i mod 4."),
        ({"first_worker": 2, "num_workers": 2}, "own", ": of worker 2 + i mod 2."),
        ({"first_worker": 2, "num_workers": 2}, "mean", ": the mean of 2 workers."),
        ({"first_worker": 2, "num_workers": 1}, "own", ": of worker 2."),
        ({"first_worker": 2, "num_workers": 1}, "mean", ": of worker 2."),
    ],
)
def test_whose_representation_it_is_is_said(
    lab: SimpleNamespace, tmp_path: Path, held: dict, representation: Literal["own", "mean"], said: str
) -> None:
    """A site has the models of its own workers alone."""
    source = _trained(lab, tmp_path)
    described = json.loads((tmp_path / MODEL).read_text())
    (tmp_path / MODEL).write_text(json.dumps({**described, **held}))
    session = open_join(source, NewWorkers(workers=3, representation=representation), lab.cpu)
    assert any(note.endswith(said) for note in session.notes)
