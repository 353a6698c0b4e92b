"""The engine for GPUs with recordings, emulated on a CPU: what is recorded once is right whenever it is replayed."""

import gc
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from manyheads.data.shards import Shards
from manyheads.engine.cuda_graphs import CudaGraphsEngine
from manyheads.engine.cuda_graphs.engine import _KEPT
from manyheads.engine.cuda_graphs.lane import Lane, Replay
from manyheads.engine.phase import SGD, Phase, Steps, cross_entropy
from manyheads.engine.precision import Precision
from manyheads.tree import Params

from .recorder import Mistake, Recording

HEAD, BODY = frozenset({"head"}), frozenset({"representation"})
CPU = torch.device("cpu")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Recording]:
    """Lanes record as they do on a GPU; these are the recordings that somebody still has."""
    made: WeakSet[Recording] = WeakSet()

    def record(lane: Lane, step: Callable[[], None]) -> Replay:
        recording = Recording(step)
        made.add(recording)
        return recording.replay

    monkeypatch.setattr(Lane, "record", record)
    return made


def smooth(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A net that is stacked through vmap."""
    first = (nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.3))
    return nn.Sequential(*first, nn.Linear(6, num_outputs))


def convolutional(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A net that is trained in slots for its convolution, its head on features that are computed once."""
    first = (nn.Conv2d(1, 3, 3), nn.Softsign(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(27, 6))
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(6, num_outputs))


NETS = {
    "chain": {"net": "narrow-dnn"},
    "chain-of-images": {"net": "cnn", "sizes": (7, 3, 9)},
    "stack-of-several-sizes": {"net": "mlp:6", "sizes": tuple(range(1, 13))},
    "vmap": {"net": smooth},
    "slots": {"net": convolutional},
    "batchnorm": {"net": "batchnorm"},
    "batches-of-several-widths": {"net": "batchnorm", "sizes": (45, 3, 64, 41), "batch_size": 32},
}


def rolled(tree: Params) -> Params:
    """Every worker gets another's rows, in new memory."""
    return {name: leaf.roll(1, 0) for name, leaf in tree.items()}


def biased(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
    return cross_entropy(outputs["head"] + constants["bias"], y)


def everything(params: Params) -> dict[str, object]:
    """What a phase can ask for, all of it other in the next round."""
    return {
        "optimizer": SGD(0.05, momentum=0.9, weight_decay=0.01, clip=0.3),
        "objective": biased,
        "constants": {"bias": list(params.values())[-1]},
        "proximal": (rolled(params), 0.7),
        "mask": {name: (leaf > leaf.mean()).double() for name, leaf in params.items()},
    }


CHANGES = {
    "plain": lambda params: {},
    "everything": everything,
    "body": lambda params: {**everything(params), "update": BODY},
    "head": lambda params: {**everything(params), "update": HEAD, "stream": "head"},
    "head-eval": lambda params: {"update": HEAD, "stream": "head", "frozen": "eval"},
}

CASES = [
    *((net, "everything") for net in NETS),
    *((net, change) for net in ("chain", "batchnorm") for change in ("plain", "head-eval")),
    *((net, change) for net in ("vmap", "slots") for change in ("body", "head")),
]


def recorded(problem) -> CudaGraphsEngine:
    options = {"num_slots": 2, "num_stacked": 12, "stack_images": True, "compile": False}
    return CudaGraphsEngine(problem.work, precision=Precision("float64"), **options)


def assert_close(given: object, expected: object) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize(("net", "change"), CASES)
def test_rounds_agree_with_the_loop(problem, phase, recordings, net, change):
    """Later rounds replay what the first recorded, with other rates, batches, workers, weights and constants."""
    p = problem(**NETS[net])
    loop, ours = p.engine("loop"), recorded(p)
    params, buffers, made = p.params, p.buffers, []
    for round, workers in enumerate((None, torch.tensor([2, 0]), None)):
        asked: Phase = phase(**CHANGES[change](params))
        asked = replace(asked, optimizer=replace(asked.optimizer, lr=0.1 * 0.5**round))
        expected, given = (engine.fit(params, buffers, asked, round, workers=workers) for engine in (loop, ours))
        for tree in ("params", "buffers", "loss"):
            assert_close(getattr(given, tree), getattr(expected, tree))
        # Other weights everywhere, in frozen groups too.
        params, buffers = (rolled(tree) for tree in (expected.params, expected.buffers))
        made.append(set(recordings))
    assert made[0] and made[0] == made[1] == made[2]


@pytest.mark.parametrize("net", ["chain", "batchnorm"])
def test_scores_agree_with_the_loop(problem, recordings, net):
    """Of the shards in turn, with other weights each time."""
    p = problem(**NETS[net])
    loop, ours = p.engine("loop"), recorded(p)
    some, params = weighted(p.work.train), p.params
    for shards in (p.work.train, some, p.work.train, some):
        expected, given = (engine.evaluate(params, p.buffers, shards) for engine in (loop, ours))
        for scores in ("metric", "loss"):
            assert_close(getattr(given, scores), getattr(expected, scores))
        params = rolled(params)


@pytest.mark.parametrize("batches", [Steps(2), None])
@pytest.mark.parametrize("net", ["chain", "batchnorm"])
def test_gradients_agree_with_the_loop(problem, phase, recordings, net, batches):
    p = problem(**NETS[net])
    loop, ours = p.engine("loop"), recorded(p)
    params = p.params
    for round in range(3):
        asked = phase(**CHANGES["body"](params))
        assert_close(*(engine.gradient(params, p.buffers, asked, round, batches=batches) for engine in (loop, ours)))
        params = rolled(params)


def weighted(shards: Shards) -> Shards:
    """The same samples, some of which count for more: other shards to an engine."""
    return replace(shards, weight=torch.rand(len(shards.index), dtype=torch.float64))


def test_what_is_recorded_for_shards_goes_with_them(problem, recordings):
    """At once, so that its memory can be used for the next: not when the garbage collector comes by."""
    p = problem("mlp:6")
    ours = recorded(p)
    ours.evaluate(p.params, p.buffers, p.work.train)
    number = len(recordings)
    # Whatever torch leaves behind where it is used for the first time is no fault of the engine's.
    gc.collect()
    gc.disable()
    try:
        for _ in range(_KEPT + 1):
            ours.evaluate(p.params, p.buffers, weighted(p.work.train))
        assert len(recordings) == _KEPT * number > 0
    finally:
        gc.enable()


def test_a_replay_reads_and_writes_what_is_there_now(recordings):
    rate, total = torch.zeros(1), torch.zeros(2)
    replay = Lane(CPU).record(lambda: total.view(2, 1)[1].add_((rate * 2).exp()[0]))
    rate.fill_(1.0)
    total.zero_()
    replay()
    replay()
    assert_close(total, torch.tensor([0.0, 2 * torch.tensor(2.0).exp()]))


def test_a_number_of_pythons_is_baked_in(recordings):
    rate, total = [1.0], torch.zeros(1)
    replay = Lane(CPU).record(lambda: total.add_(rate[0]))
    rate[0] = 5.0
    total.zero_()
    replay()
    assert total.item() == 1.0


def test_memory_that_was_freed_is_missed(recordings):
    held, total = {"rate": torch.ones(1)}, torch.zeros(1)
    replay = Lane(CPU).record(lambda: total.add_(held["rate"]))
    replay()
    held["rate"] = torch.ones(1)
    with pytest.raises(Mistake, match="freed"):
        replay()


def test_memory_that_has_moved_is_missed(recordings):
    rate, total = torch.ones(1), torch.zeros(1)
    replay = Lane(CPU).record(lambda: total.add_(rate[0]))
    replay()
    rate.resize_(1 << 20)
    with pytest.raises(Mistake, match="moved"):
        replay()


FORBIDDEN = {
    "item": lambda x: x.sum().item(),
    "comparison": lambda x: bool((x > 0).all()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "written-by-mask": lambda x: x.index_put_([x > 0], x.clone()),
    "unique": lambda x: x.unique(),
    "from-the-host": lambda x: x.add_(torch.tensor(1.0)),
}


@pytest.mark.parametrize("look", FORBIDDEN)
def test_what_cannot_be_captured_is_refused(recordings, look):
    x = torch.ones(3)
    with pytest.raises(Mistake, match="cannot be captured"):
        Lane(CPU).record(lambda: FORBIDDEN[look](x))


@pytest.mark.parametrize("net", ["vmap", "slots"])
def test_an_objective_that_looks_at_numbers_is_refused(problem, phase, recordings, net):
    """Where the engine would try something else, too."""
    p = problem(**NETS[net])

    def peeking(outputs: dict[str, Tensor], y: Tensor, constants: Params) -> Tensor:
        return cross_entropy(outputs["head"], y) * len(y.unique())

    with pytest.raises(Mistake, match="unique"):
        recorded(p).fit(p.params, p.buffers, phase(objective=peeking), 0)
