"""What every engine promises besides its numbers: arguments left alone, bits that are a worker's own, true scores."""

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.algorithms.fedrod import two_losses
from manyheads.data.shards import Shards
from manyheads.engine import local
from manyheads.engine.chain import ChainKernel
from manyheads.engine.kernel import Batch
from manyheads.engine.loop import LoopKernel
from manyheads.engine.phase import SGD, Epochs, Fit, Steps, single_head
from manyheads.engine.schedule import schedule

HEAD, BODY = frozenset({"head"}), frozenset({"representation"})
EVERYTHING = SGD(0.05, momentum=0.9, weight_decay=0.01, clip=0.3)
KERNELS = {
    "mlp": ("loop", "chain", "vmap"),
    "mlp-odd": ("loop", "chain"),
    "mlp-column": ("loop", "chain"),
    "dnn": ("loop", "chain"),
    "smooth": ("loop", "chain"),
    "batchnorm": ("loop", "vmap"),
    "centred": ("loop",),
}
NETS = {
    "mlp": "mlp:12,8",
    "dnn": "narrow-dnn",
    "mlp-odd": "mlp:25,21,17",
    "mlp-column": "mlp:120,1,120",
    "smooth": "smooth",
}
"""The odd one's rows begin nowhere in particular; the column's products are sometimes those with a vector."""
RUNS = [(net, kind) for net, kinds in KERNELS.items() for kind in kinds]


@pytest.fixture(scope="session")
def make(problem):
    def make(net: str, **options):
        return problem(NETS.get(net, net), **options)

    return make


class Turned(nn.Module):
    """Images [B, 1, H, W] as [B, W, H], in the memory that they have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(1).mT


def turned(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A net that torch multiplies in one way while its weights want gradients, and in another while they do not."""
    return nn.Sequential(Turned(), nn.Linear(8, 21, bias=False), nn.Flatten(), nn.Linear(168, num_outputs))


def assert_same_bits(a: Fit, b: Fit) -> None:
    for first, second in ((a.params, b.params), (a.buffers, b.buffers), ({"loss": a.loss}, {"loss": b.loss})):
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("update", [HEAD | BODY, HEAD, BODY], ids=["joint", "head", "body"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("net", "kind"), RUNS)
def test_no_argument_is_changed(make, phase, net, kind, chunk, update):
    p = make(net, sizes=(7, 3, 5))
    asked = phase(update=update, optimizer=EVERYTHING, proximal=(p.anchor(), 0.5), mask=p.mask())
    leaves = [
        *p.params.values(),
        *p.buffers.values(),
        *asked.proximal[0].values(),
        *asked.mask.values(),
        p.work.train.x,
    ]
    before = [leaf.clone() for leaf in leaves]
    engine = p.engine(kind, chunk=chunk)
    first = engine.fit(p.params, p.buffers, asked, 0)
    engine.evaluate(first.params, first.buffers, p.work.train)
    engine.gradient(first.params, first.buffers, asked, 0)
    for leaf, old in zip(leaves, before, strict=True):
        assert torch.equal(leaf, old)
    assert_same_bits(engine.fit(p.params, p.buffers, asked, 0), first)
    moved = [name for name, leaf in p.params.items() if not torch.equal(first.params[name], leaf)]
    assert {name.split(".")[0] for name in moved} == update


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("net", "kind"), RUNS)
def test_threads_do_not_change_a_bit(make, phase, net, kind, dtype):
    p = make(net, dtype=dtype)
    for update in (HEAD | BODY, HEAD):
        asked = phase(update=update, optimizer=EVERYTHING)
        one, two = (p.engine(kind, threads=threads, chunk=2).fit(p.params, p.buffers, asked, 1) for threads in (1, 2))
        assert_same_bits(two, one)
    scores = [p.engine(kind, threads=threads).evaluate(p.params, p.buffers, p.work.train) for threads in (1, 2)]
    assert torch.equal(scores[0].loss, scores[1].loss) and torch.equal(scores[0].metric, scores[1].metric)
    gradients = [p.engine(kind, threads=threads).gradient(p.params, p.buffers, phase(), 0) for threads in (1, 2)]
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name]), name


@pytest.mark.parametrize("before", [HEAD, BODY, HEAD | BODY], ids=["head", "body", "joint"])
def test_what_was_done_before_does_not_change_a_bit(problem, phase, before):
    """As where a round's theory was measured, or where the run has just been continued."""
    p = problem(turned, sizes=(40, 30))
    fresh, used = p.engine("loop"), p.engine("loop")
    used.gradient(p.params, p.buffers, phase(update=before), 0)
    found, expected = (engine.evaluate(p.params, p.buffers, p.work.train) for engine in (used, fresh))
    assert torch.equal(found.loss, expected.loss)
    used.gradient(p.params, p.buffers, phase(update=before), 0)
    head = phase(update=HEAD, optimizer=EVERYTHING)
    assert_same_bits(used.fit(p.params, p.buffers, head, 1), fresh.fit(p.params, p.buffers, head, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("net", "kind"), RUNS)
def test_the_workers_beside_do_not_change_a_bit(make, phase, net, kind, dtype):
    """A worker's numbers are its own: alone, in other chunks, in another order."""
    p = make(net, dtype=dtype)
    for update in (HEAD | BODY, HEAD):
        asked = phase(update=update, optimizer=EVERYTHING)
        everyone = p.engine(kind, chunk=5).fit(p.params, p.buffers, asked, 1)
        for workers, chunk in (([3, 1], 2), ([2], 1), ([4, 0, 3], 2), ([4, 2, 1, 3, 0], 1)):
            part = p.take(workers)
            fit = part.engine(kind, chunk=chunk).fit(part.params, part.buffers, asked, 1)
            expected = Fit(
                {name: leaf[workers] for name, leaf in everyone.params.items()},
                {name: leaf[workers] for name, leaf in everyone.buffers.items()},
                everyone.loss[workers],
            )
            if kind == "vmap":
                # Other kernels of torch serve other numbers of stacked workers: to rounding.
                close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
                torch.testing.assert_close((fit.params, fit.buffers), (expected.params, expected.buffers), **close)
            else:
                assert_same_bits(fit, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("net", "kind"), RUNS)
def test_scores_are_a_workers_own_too(make, net, kind, dtype):
    p = make(net, sizes=(7, 150, 9, 0, 12, 300), dtype=dtype)
    everyone = p.engine(kind, chunk=6).evaluate(p.params, p.buffers, p.work.train)
    for workers, chunk in (([4, 2], 2), ([5], 1), ([1, 5, 0], 1), ([3, 2, 1, 5], 4)):
        part = p.take(workers)
        result = part.engine(kind, chunk=chunk).evaluate(part.params, part.buffers, part.work.train)
        expected = (everyone.metric[workers], everyone.loss[workers])
        tolerance = 0 if kind != "vmap" else 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            (result.metric, result.loss), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_loss_that_is_computed_in_vectors_is_a_workers_own_too(make, phase, dtype):
    """torch rounds the few numbers that fill no vector otherwise: with cross entropy that does not show."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.softplus(output.sum(1) - y)

    p = make("mlp", dtype=dtype)
    p = replace(p, work=replace(p.work, loss=loss, metric=loss))
    asked = phase(objective=single_head(loss))
    fit = p.engine("chain", chunk=5).fit(p.params, p.buffers, asked, 1)
    scores = p.engine("chain", chunk=5).evaluate(p.params, p.buffers, p.work.train)
    for row in range(5):
        alone = p.take([row])
        own = alone.engine("chain").fit(alone.params, alone.buffers, asked, 1)
        assert_same_bits(own, Fit({name: leaf[[row]] for name, leaf in fit.params.items()}, {}, fit.loss[[row]]))
        score = alone.engine("chain").evaluate(alone.params, alone.buffers, alone.work.train)
        assert (score.metric, score.loss) == (scores.metric[[row]], scores.loss[[row]])


@pytest.mark.parametrize("kind", KERNELS["mlp"])
@pytest.mark.parametrize(
    ("size", "room", "passes"),
    [
        (5, 3 * 920, [(3, 8)] * 2),
        (5, 920, [(1, 5)] * 6),
        (100, 2 * 128 * 64, [(2, 128)] * 3),
        (100, 128 * 64, [(1, 100)] * 6),
        (300, 6 * 100 * 64, [(6, 100)] * 3),
        (300, 920, [(1, 100)] * 18),
    ],
)
def test_workers_are_scored_together_while_they_and_their_inputs_are_small(make, monkeypatch, kind, size, room, passes):
    """However many a chunk may have: images would fill the memory. One that is scored alone is not padded."""
    p, seen = make("mlp", sizes=(size,) * 6), []
    assert sum(leaf[0].numel() for leaf in p.params.values()) == 920
    monkeypatch.setattr(local, "_STACKED", room)
    engine = p.engine(kind, chunk=6)
    scoring = engine.kernel.scoring

    def spied(*args):
        outputs = scoring(*args)
        return lambda x: seen.append(tuple(x.shape[:2])) or outputs(x)

    monkeypatch.setattr(engine.kernel, "scoring", staticmethod(spied))
    engine.evaluate(p.params, p.buffers, p.work.train)
    assert seen == ([(1, size)] * 6 if kind == "loop" and size < 128 else [(1, 100)] * 18 if kind == "loop" else passes)


def test_a_batch_larger_than_all_there_is_costs_what_there_is(make, phase, monkeypatch):
    """Nothing is as large as the batch size; a worker's bits stay its own, and the engines agree."""
    widths, grams = [], []
    step, bmm = ChainKernel.step, torch.bmm

    def watched(kernel: ChainKernel, batch: Batch) -> Tensor:
        widths.append(batch.x.shape[1])
        return step(kernel, batch)

    def product(a: Tensor, b: Tensor) -> Tensor:
        grams.append(a.shape[1] == b.shape[2] == widths[-1] > 256)
        return bmm(a, b)

    monkeypatch.setattr(ChainKernel, "step", watched)
    monkeypatch.setattr(torch, "bmm", product)
    p = make("mlp", sizes=(300, 7, 513, 9), batch_size=10**6)
    asked = phase(optimizer=EVERYTHING)
    everyone = p.engine("chain", chunk=4).fit(p.params, p.buffers, asked, 1)
    assert set(widths) == {256, 512, 1024} and not any(grams)
    for row in range(4):
        alone = p.take([row])
        fit = alone.engine("chain").fit(alone.params, alone.buffers, asked, 1)
        expected = ({name: leaf[[row]] for name, leaf in tree.items()} for tree in (everyone.params, everyone.buffers))
        assert_same_bits(fit, Fit(*expected, everyone.loss[[row]]))
    plain = p.engine("loop").fit(p.params, p.buffers, asked, 1)
    torch.testing.assert_close(everyone.params, plain.params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["loop", "chain", "vmap"])
def test_rounds_streams_and_workers_draw_their_own_batches(make, phase, kind):
    p = make("mlp", sizes=(9, 9))
    same = {name: leaf[:1].repeat(2, *[1] * (leaf.ndim - 1)) for name, leaf in p.params.items()}
    index, y = (leaf[:9].repeat(2) for leaf in (p.work.train.index, p.work.train.y))
    p = replace(p, work=replace(p.work, train=replace(p.work.train, index=index, y=y)), params=same)
    engine = p.engine(kind)
    fits = [
        engine.fit(p.params, p.buffers, phase(stream=stream), round) for stream in ("body", "head") for round in (0, 1)
    ]
    results = [fit.params["head.fc3.weight"][worker] for fit in fits for worker in (0, 1)]
    for k, first in enumerate(results):
        for second in results[k + 1 :]:
            assert not torch.equal(first, second)


def test_dropout_is_drawn_anew_for_every_worker_round_stream_and_step(make, phase):
    """Seen through the loss of a net that cannot move: full batches in one order, so that only the masks differ."""
    p = make("dnn", sizes=(2, 2), batch_size=2)
    index, y = (leaf[:2].repeat(2) for leaf in (p.work.train.index, p.work.train.y))
    same = {name: leaf[:1].repeat(2, *[1] * (leaf.ndim - 1)) for name, leaf in p.params.items()}
    p = replace(p, work=replace(p.work, train=replace(p.work.train, index=index, y=y)), params=same)

    def losses(stream: str, round: int, steps: int) -> list[float]:
        still = phase(stream=stream, amount=Steps(steps), optimizer=SGD(0.0))
        return p.engine("chain").fit(p.params, p.buffers, still, round).loss.tolist()

    first = [*losses("body", 0, 1), *losses("body", 1, 1), *losses("head", 0, 1)]
    second = [2 * two - one for one, two in zip(losses("body", 0, 1), losses("body", 0, 2), strict=True)]
    assert len({round(loss, 12) for loss in first + second}) == len(first) + len(second)
    assert losses("body", 0, 2) == losses("body", 0, 2)


def test_a_loss_that_is_no_number_is_reported_as_infinite(make, phase):
    p = make("mlp")
    p.params["head.fc3.bias"][2] = float("nan")
    for kind in KERNELS["mlp"]:
        loss = p.engine(kind).fit(p.params, p.buffers, phase(), 0).loss
        assert loss.isinf().tolist() == [False, False, True, False, False] and not loss.isnan().any()
    below = phase(objective=lambda outputs, y, constants: outputs["head"].sum(1) - torch.inf)
    assert p.engine("loop").fit(p.params, p.buffers, below, 0).loss.tolist() == [torch.inf] * 5, "nor below all numbers"


@pytest.mark.parametrize("kind", ["loop", "chain", "vmap"])
def test_a_worker_without_samples_stays_as_it_is(make, phase, kind):
    p = make("mlp", sizes=(4, 0, 6))
    fit = p.engine(kind).fit(p.params, p.buffers, phase(optimizer=EVERYTHING), 0)
    assert fit.loss.isnan().tolist() == [False, True, False]
    for name, leaf in p.params.items():
        assert torch.equal(fit.params[name][1], leaf[1])


def module_of(p, row: int) -> nn.Module:
    """One worker's net in eval mode, on tensors of its own."""
    import copy

    net = copy.deepcopy(p.work.model).eval()
    state = {name: leaf[row].clone() for name, leaf in {**p.params, **p.buffers}.items()}
    net.load_state_dict(state)
    return net.requires_grad_(True)


@pytest.mark.parametrize(("net", "kind"), [run for run in RUNS if run[0] in ("mlp", "dnn", "batchnorm")])
def test_evaluate_is_a_hand_count(make, net, kind):
    p = make(net, sizes=(7, 0, 9))
    shards = p.work.train
    result = p.engine(kind).evaluate(p.params, p.buffers, shards)
    for row in (0, 2):
        model = module_of(p, row)
        here = shards.rows(row)
        hits, loss = 0, 0.0
        for entry in range(here.start, here.stop):
            scores = model(shards.x[shards.index[entry]].unsqueeze(0))[0].detach()
            hits += int(scores.argmax()) == int(shards.y[entry])
            loss -= float(scores.log_softmax(0)[shards.y[entry]])
        assert float(result.metric[row]) == pytest.approx(hits / shards.sizes[row], rel=1e-12)
        assert float(result.loss[row]) == pytest.approx(loss / shards.sizes[row], rel=1e-10)
    assert result.metric[1].isnan() and result.loss[1].isnan()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["loop", "chain", "vmap"])
def test_nobody_holds_on_to_rows(make, phase, kind, threads):
    """A round's state is all of the memory: one that nobody looks at any more must not stay."""
    p = make("mlp")
    engine = p.engine(kind, threads=threads)

    def work() -> list[weakref.ref]:
        arrays = [leaf.numpy().copy() for leaf in p.params.values()]
        params = dict(zip(p.params, map(torch.from_numpy, arrays), strict=True))
        engine.fit(params, p.buffers, phase(update=HEAD), 0)
        engine.evaluate(params, p.buffers, p.work.train)
        engine.gradient(params, p.buffers, phase(), 0)
        return [weakref.ref(array) for array in arrays]

    assert all(array() is None for array in work())


@pytest.mark.parametrize("kind", KERNELS["mlp"])
def test_evaluate_weighs_samples(make, kind):
    p = make("mlp", sizes=(3, 5))
    weight = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    weighted = p.engine(kind).evaluate(p.params, p.buffers, replace(p.work.train, weight=weight))
    single = [(index, y) for index, y in zip(p.work.train.index, p.work.train.y, strict=True)]
    owner = [0, 0, 0, 1, 1, 1, 1, 1]
    hits, losses = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for entry, (index, y) in enumerate(single):
        scores = module_of(p, owner[entry])(p.work.train.x[index].unsqueeze(0)).detach()
        hits[entry], losses[entry] = float(scores.argmax() == y), F.cross_entropy(scores, y.unsqueeze(0))
    for row, entries in ((0, slice(0, 3)), (1, slice(3, 8))):
        share = weight[entries] / weight[entries].sum()
        assert float(weighted.metric[row]) == pytest.approx(float((share * hits[entries]).sum()), rel=1e-10)
        assert float(weighted.loss[row]) == pytest.approx(float((share * losses[entries]).sum()), rel=1e-10)


@pytest.mark.parametrize("kind", KERNELS["mlp"])
def test_scores_are_exact_fractions_in_single_precision(make, kind):
    p = make("mlp", sizes=(10, 30), dtype=torch.float32)
    metric = p.engine(kind).evaluate(p.params, p.buffers, p.work.train).metric
    for row, size in enumerate((10, 30)):
        assert float(metric[row]) in {hits / size for hits in range(size + 1)}


@pytest.mark.parametrize("kind", KERNELS["mlp"])
def test_evaluate_goes_through_shards_larger_than_one_pass(make, kind):
    p = make("mlp", sizes=(2, 2))
    entries = torch.arange(3000) % 4
    long = Shards(p.work.train.x, entries, p.work.train.y[entries], (0, 1500, 3000))
    result = p.engine(kind).evaluate(p.params, p.buffers, long)
    for row in range(2):
        here = entries[long.rows(row)]
        scores = module_of(p, row)(p.work.train.x[here]).detach()
        assert float(result.metric[row]) == pytest.approx(
            float((scores.argmax(1) == p.work.train.y[here]).double().mean())
        )
        assert float(result.loss[row]) == pytest.approx(float(F.cross_entropy(scores, p.work.train.y[here])))


@pytest.mark.parametrize("update", [HEAD | BODY, HEAD, BODY], ids=["joint", "head", "body"])
@pytest.mark.parametrize("net", ["mlp", "dnn", "batchnorm"])
def test_gradient_is_autograds_over_the_whole_shard(make, phase, net, update):
    """Of one that takes several passes, too: as a mean over all samples, not a sum of the passes' means."""
    p = make(net, sizes=(300, 3))
    gradient = p.engine("loop").gradient(p.params, p.buffers, phase(update=update), 0)
    assert list(gradient) == [name for name in p.params if name.split(".")[0] in update]
    shards = p.work.train
    for row in range(2):
        model, here = module_of(p, row), shards.rows(row)
        loss = F.cross_entropy(model(shards.x[shards.index[here]]), shards.y[here])
        for name, leaf in gradient.items():
            (expected,) = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)
            torch.testing.assert_close(leaf[row], expected, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_streams_first_batches(make, phase):
    p = make("mlp", sizes=(7, 9))
    asked = phase(stream="regrow", amount=Epochs(1))
    shards = p.work.train
    for steps in (1, 2):
        gradient = p.engine("loop").gradient(p.params, p.buffers, asked, 4, batches=Steps(steps))
        for row in range(2):
            drawn = schedule(shards, [row], p.work.ids, replace(asked, amount=Steps(steps)), p.work.source, 4)
            entries = torch.from_numpy(drawn.drawn(0))
            model = module_of(p, row)
            F.cross_entropy(model(shards.x[shards.index[entries]]), shards.y[entries]).backward()
            for name, leaf in gradient.items():
                torch.testing.assert_close(leaf[row], model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


def test_gradient_reads_constants(make, phase):
    p = make("mlp", sizes=(7, 3), generic=True)
    log_counts = torch.tensor([[0.0, 1.0, 2.0, -1.0], [0.5, 0.0, -2.0, 1.0]], dtype=torch.float64)
    asked = phase(objective=two_losses, update=BODY | {"generic"}, constants={"log_counts": log_counts})
    gradient = p.engine("loop").gradient(p.params, p.buffers, asked, 0)
    shards = p.work.train
    for row in range(2):
        model, here = module_of(p, row), shards.rows(row)
        features = model.get_submodule("representation")(shards.x[shards.index[here]])
        scores: Tensor = model.get_submodule("generic")(features)
        F.cross_entropy(scores + log_counts[row], shards.y[here]).backward()
        for name, leaf in gradient.items():
            torch.testing.assert_close(leaf[row], model.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


def test_gradient_of_workers_without_a_batch_is_zero(make, phase):
    """One sample in a net with BatchNorm, or none at all: there is no mini-batch to take it on."""
    p = make("batchnorm", sizes=(1, 6, 0))
    gradient = p.engine("loop").gradient(p.params, p.buffers, phase(), 0, batches=Steps(1))
    for name, leaf in gradient.items():
        assert not leaf[0].any() and not leaf[2].any(), name
    assert any(leaf[1].any() for leaf in gradient.values())


def test_modules_with_their_own_randomness_run_alone_and_reproducibly(problem, phase):
    """They draw from torch's generator, seeded per worker, round and stream, which is put back."""

    def noisy(input_shape, num_outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, num_outputs))

    p = problem(noisy, sizes=(7, 5))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = p.engine("loop", threads=2).fit(p.params, p.buffers, phase(), 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert_same_bits(p.engine("loop").fit(p.params, p.buffers, phase(), 0), first)
    alone = p.take([1])
    fit = alone.engine("loop").fit(alone.params, alone.buffers, phase(), 0)
    assert torch.equal(fit.loss, first.loss[1:])
    assert not torch.equal(p.engine("loop").fit(p.params, p.buffers, phase(), 1).loss, first.loss)
    # Of a single sample a round draws no other order.
    p = problem(noisy, sizes=(1, 1))
    losses = [p.engine("loop").fit(p.params, p.buffers, phase(), round).loss for round in (0, 1)]
    assert (losses[0] != losses[1]).all()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def test_noise_at_all_times_is_reproducible_too(problem, phase):
    """In scores, gradients and the features of a frozen representation in eval mode."""

    def noisy(input_shape, num_outputs):
        return nn.Sequential(nn.Flatten(), Noise(), nn.Linear(64, 8), nn.Linear(8, num_outputs))

    p = problem(noisy, sizes=(7, 5))
    head = phase(update=HEAD, frozen="eval")

    def numbers(workers: list[int]) -> list[Tensor]:
        some = p.take(workers)
        engine = some.engine("loop")
        return [
            engine.evaluate(some.params, some.buffers, some.work.train).loss,
            engine.gradient(some.params, some.buffers, phase(), 0)["head.3.weight"],
            engine.fit(some.params, some.buffers, head, 0).loss,
        ]

    first, again, alone = numbers([0, 1]), numbers([0, 1]), numbers([1])
    for one, two, own in zip(first, again, alone, strict=True):
        assert torch.equal(one, two) and torch.equal(one[1:], own)


def test_no_thread_works_on_after_ctrl_c(make, phase, monkeypatch):
    """A process that has said it stopped must not go on for minutes; the engine works again."""
    p = make("mlp", sizes=(4, 400), batch_size=1)
    engine, step, steps = p.engine("loop", threads=2), LoopKernel.step, []

    def counted(kernel: LoopKernel, batch: Batch) -> Tensor:
        steps.append(batch.step)
        time.sleep(0.002)
        return step(kernel, batch)

    def interrupted(pool, work, items):
        futures = [pool.submit(work, item) for item in items]
        futures[-1].result()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoopKernel, "step", counted)
        patch.setattr(ThreadPoolExecutor, "map", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.fit(p.params, p.buffers, phase(), 0)
        seen = len(steps)
        time.sleep(0.05)
        assert 0 < seen == len(steps) < 800
    assert_same_bits(engine.fit(p.params, p.buffers, phase(), 0), p.engine("loop").fit(p.params, p.buffers, phase(), 0))


@pytest.mark.parametrize("kind", ["loop", "chain"])
def test_progress_counts_the_batches_of_a_phase(problem, phase, kind):
    p = problem("mlp:6", sizes=(9, 4, 2))
    engine = p.engine(kind)
    assert str(engine.progress) == ""
    engine.fit(p.params, p.buffers, phase(amount=Epochs(2)), 0)
    total = 2 * sum(-(-size // p.work.source.batch_size) for size in (9, 4, 2))
    assert (engine.progress.done, engine.progress.total) == (total, total)
    engine.fit(p.params, p.buffers, phase(amount=Epochs(2)), 0, workers=torch.tensor([1]))
    assert 0 < engine.progress.done == engine.progress.total < total
