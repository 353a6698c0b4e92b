"""Every field of a record by its definition, computed by hand on a tiny run."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyheads.algorithms import DPSGD, DePRL, Ditto, FedAvg, Local, State
from manyheads.algorithms.base import Algorithm
from manyheads.algorithms.phases import train_whole
from manyheads.data import Dataset
from manyheads.engine.phase import Steps
from manyheads.errors import UserError
from manyheads.network.in_process import InProcess
from manyheads.rounds import train
from manyheads.tree import add_prefix, strip_prefix


def worker_scores(session, state: State, shards) -> tuple[list[float | None], list[float | None]]:
    """Each worker's accuracy and mean loss on its shard, sample by sample; None without samples."""
    models = session.experiment.algorithm.models(state, session.ctx)
    net = copy.deepcopy(session.ctx.model).eval()
    hits, losses = [], []
    for worker in range(shards.num_workers):
        net.load_state_dict({n: v[worker] for n, v in {**models.params, **models.buffers}.items()})
        here = shards.rows(worker)
        x, y = shards.x[shards.index[here]], shards.y[here]
        with torch.no_grad():
            scores = net(x)
        hits.append(float((scores.argmax(1) == y).double().mean()) if len(y) else None)
        losses.append(float(F.cross_entropy(scores, y)) if len(y) else None)
    return hits, losses


def uneven(lab) -> Dataset:
    """Worker 3 has no test samples, worker 0 fewer than the others."""
    data = lab.blobs()
    keep = data.user_test != 3
    keep[:7] = False
    return Dataset(
        "uneven",
        data.x_train,
        data.y_train,
        data.x_test[keep],
        data.y_test[keep],
        3,
        data.user_train,
        data.user_test[keep],
    )


@pytest.mark.parametrize("order", ["train-mix", "mix-train"])
def test_every_field_by_its_definition(lab, order):
    experiment = lab.tiny(DePRL(order=order), data=uneven(lab), validation=0.2, rounds=2)
    session = lab.opened(experiment)
    kind, ctx, federation = experiment.algorithm, session.ctx, session.federation
    records = list(train(experiment, lab.cpu))
    state = kind.init(ctx)
    for round, record in enumerate(records):
        if order == "train-mix":
            before, log = kind.local(state, round, ctx)
            trained, mixed = before, kind.mix(before, round, ctx)
            state = mixed
        else:
            before = state
            mixed = kind.mix(before, round, ctx)
            trained, log = kind.local(mixed, round, ctx)
            state = trained
        accuracy, _ = worker_scores(session, state, federation.test)
        assert accuracy[3] is None
        tested = np.array(accuracy[:3])
        assert record.round == round + 1
        assert (record.algorithm, record.run_id) == ("deprl", session.experiment.run_id)
        assert record.accuracy_mean == pytest.approx(tested.mean())
        assert record.accuracy_std == pytest.approx(tested.std())
        assert record.accuracy_worst10 == pytest.approx(tested.min())
        assert record.accuracy_by_samples == pytest.approx(np.average(tested, weights=federation.test.sizes[:3]))
        assert record.workers_without_test == 1
        accuracy_before, _ = worker_scores(session, before, federation.test)
        assert record.accuracy_before_mixing == pytest.approx(np.mean(accuracy_before[:3]))
        held_out, _ = worker_scores(session, state, federation.validation)
        assert record.accuracy_validation == pytest.approx(np.mean([score for score in held_out if score is not None]))
        _, train_losses = worker_scores(session, trained, federation.train)
        assert record.train_loss == pytest.approx(np.mean(train_losses), rel=1e-10)
        assert list(log) == ["head", "body"]
        assert record.loss == pytest.approx(float(log["body"].loss.mean()), rel=1e-10)
        for field, where in (("consensus_error", mixed), ("consensus_error_before_mixing", before)):
            phi = torch.cat([v.flatten(1) for n, v in where.params.items() if n.startswith("representation.")], dim=1)
            expected = float((phi - phi.mean(0)).square().sum() / 4)
            assert getattr(record, field) == pytest.approx(expected, rel=1e-9)
            if field == "consensus_error":
                assert record.consensus_error_relative == pytest.approx(expected / float(phi.mean(0).square().sum()))
        # A ring of four: two neighbours each; the representation is a 6 x 5 layer in double precision.
        assert record.bytes_sent_per_worker == record.bytes_received_per_worker == (round + 1) * 2 * 8 * (6 * 5 + 5)
        assert record.bytes_on_wire == 0
        assert record.per_worker["accuracy"] == [*map(pytest.approx, accuracy[:3]), None]
        assert record.per_worker["train_loss"] == pytest.approx(train_losses)
    assert records[0].seconds < records[1].seconds
    assert records[0].peak_memory_bytes > 1e7


def test_processes_tell_each_other_recorded_scores_alone(lab, monkeypatch):
    """Not the accuracy on the train shards, say, nor how many samples a score is the mean of."""
    told = []

    def gather(network: InProcess, values: torch.Tensor) -> torch.Tensor:
        told.append(values.numpy())
        return values

    monkeypatch.setattr(InProcess, "gather", gather)
    (record,) = train(lab.tiny(DPSGD(), data=uneven(lab), validation=0.2, rounds=1), lab.cpu)
    # After the losses of the round's only phase, the times of workers and messages, and how far apart workers are.
    *_, accuracy, before, train_loss, held_out, _counts, _bytes = told
    for scores, mean in (
        (accuracy, record.accuracy_mean),
        (before, record.accuracy_before_mixing),
        (train_loss, record.train_loss),
        (held_out, record.accuracy_validation),
    ):
        score, there = scores.T
        assert score[there > 0].mean() == pytest.approx(mean) and set(there) <= {0, 1}


def test_where_a_state_holds_copies_of_the_net_alone_nobody_knows_how_far_representations_agree(lab):
    """Of no leaves at all it would be 0, which says that they do."""

    @dataclass(frozen=True, kw_only=True)
    class Copies(Algorithm):
        name: ClassVar[str] = "copies"
        title: ClassVar[str] = "Copies"

        def init(self, ctx):
            return State(add_prefix(ctx.initial.params, "copy"), ctx.initial.buffers)

        def local(self, state, round, ctx):
            moved, log = train_whole(self.models(state, ctx), round, ctx, Steps(1), None)
            return State(add_prefix(moved.params, "copy"), moved.buffers), log

        def mix(self, state, round, ctx):
            return ctx.mix(state, {"copy"}, round)

        def models(self, state, ctx):
            return State(strip_prefix(state.params, "copy"), state.buffers)

    record = list(train(lab.tiny(Copies()), lab.cpu))[-1]
    found = [record.consensus_error, record.consensus_error_relative, record.consensus_error_before_mixing]
    assert np.isnan(found).all() and np.isfinite(record.similarity_representations)
    with pytest.raises(UserError, match=r"theory-every .* has no head and representation: leave it out"):
        list(train(lab.tiny(Copies()), replace(lab.cpu, theory_every=1)))


def test_the_majority_floor(lab):
    """The test share of each worker's most frequent train class, averaged over the workers that have test samples."""
    experiment = lab.tiny(Local(), data=uneven(lab), rounds=1)
    federation = lab.opened(experiment).federation
    shares = []
    for worker in range(3):
        train_y = federation.train.y[federation.train.rows(worker)]
        test_y = federation.test.y[federation.test.rows(worker)]
        shares.append(float((test_y == torch.bincount(train_y).argmax()).double().mean()))
    (record,) = train(experiment, lab.cpu)
    assert record.majority_floor == pytest.approx(np.mean(shares))


def test_a_metric_of_ones_own_has_no_majority_floor(lab):
    def likelihood(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(output, target, reduction="none")

    (record,) = train(lab.tiny(DePRL(), rounds=1, metric=likelihood), lab.cpu)
    assert record.accuracy_mean < 0 and record.majority_floor is None


def test_without_a_validation_part_there_is_no_validation_accuracy(lab):
    (record,) = train(lab.tiny(DePRL(), rounds=1), lab.cpu)
    assert record.accuracy_validation is None


def test_the_worst_tenth_of_many_workers(lab):
    workers = 11
    data = lab.blobs(workers=workers, sizes=(6,) * workers)
    (record,) = train(lab.tiny(Local(), data=data, workers=workers, rounds=1), lab.cpu)
    lowest = sorted(record.per_worker["accuracy"])[:2]
    assert record.accuracy_worst10 == pytest.approx(sum(lowest) / 2)


def test_a_servers_bytes(lab):
    record = list(train(lab.tiny(FedAvg(), rounds=2), lab.cpu))[-1]
    whole = 8 * (6 * 5 + 5 + 5 * 3 + 3)
    assert record.bytes_sent_per_worker == record.bytes_received_per_worker == 2 * whole
    half = list(train(lab.tiny(FedAvg(participation=0.5), rounds=2), lab.cpu))[-1]
    assert half.bytes_sent_per_worker == half.bytes_received_per_worker == whole


def test_the_loss_is_that_of_the_last_phase(lab):
    experiment = lab.tiny(Ditto(epochs=1), rounds=1)
    session = lab.opened(experiment)
    _, log = experiment.algorithm.local(experiment.algorithm.init(session.ctx), 0, session.ctx)
    (record,) = train(experiment, lab.cpu)
    assert list(log) == ["body", "personal"]
    assert record.loss == pytest.approx(float(log["personal"].loss.mean()))


def test_workers_that_take_no_part_do_not_count_in_the_loss(lab):
    experiment = lab.tiny(FedAvg(participation=0.5), rounds=1)
    session = lab.opened(experiment)
    _, log = experiment.algorithm.local(experiment.algorithm.init(session.ctx), 0, session.ctx)
    (record,) = train(experiment, lab.cpu)
    taken = log["body"].loss[~log["body"].loss.isnan()]
    assert len(taken) == 2
    assert record.loss == pytest.approx(float(taken.mean()))


def test_a_loss_of_minus_infinity_ends_the_run(lab):
    @dataclass(frozen=True, kw_only=True)
    class Overflowing(DPSGD):
        name: ClassVar[str] = "overflowing"
        title: ClassVar[str] = "Overflowing"

        def local(self, state, round, ctx):
            state, log = super().local(state, round, ctx)
            return state, {name: replace(work, loss=work.loss - float("inf")) for name, work in log.items()}

    with pytest.raises(UserError, match="is not a number in round 1"):
        list(train(lab.tiny(Overflowing(), rounds=1), lab.cpu))
