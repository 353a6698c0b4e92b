"""The plain kernel computes what PyTorch's own modules, optimiser and clip compute."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.engine.phase import SGD, Epochs, Phase, Steps
from manyheads.engine.schedule import schedule
from manyheads.models.nets import NETS, mlp
from manyheads.tree import clone, group

HEAD, BODY = frozenset({"head"}), frozenset({"representation"})
CLASSES, ROUND = 4, 3


def reference(net: nn.Sequential, p, phase: Phase, row: int) -> tuple[list[Tensor], list[Tensor], float]:
    """One worker's phase by hand: weights, statistics and mean loss. The last layer of ``net`` is its head."""
    net = net.double()
    for theirs, ours in ((net.named_parameters(), p.params), (net.named_buffers(), p.buffers)):
        for (_, mine), leaf in zip(theirs, ours.values(), strict=True):
            mine.data = leaf[row].clone()
    moving, anchors, masks = [], [], []
    for (name, leaf), parameter in zip(p.params.items(), net.parameters(), strict=True):
        parameter.requires_grad_(group(name) in phase.update)
        if parameter.requires_grad:
            moving.append(parameter)
            anchors.append(leaf[row] if phase.proximal is None else phase.proximal[0][name][row])
            masks.append(torch.ones_like(leaf[row]) if phase.mask is None else phase.mask[name][row])
    strength = 0.0 if phase.proximal is None else phase.proximal[1]

    net.train()
    if "representation" not in phase.update and phase.frozen == "eval":
        for layer in net[:-1]:
            layer.eval()
    statistics = [buffer.clone() for buffer in net.buffers()]
    sgd = phase.optimizer
    optimiser = torch.optim.SGD(moving, lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    train, total, seen = p.work.train, 0.0, 0
    batches = schedule(train, [row], p.work.ids, phase, p.work.source, ROUND)
    for padded, count in zip(batches.entries, batches.counts, strict=True):
        entries = padded[:count]
        loss = F.cross_entropy(net(train.x[train.index[entries]]), train.y[entries])
        total, seen = total + float(loss.detach()) * int(count), seen + int(count)
        optimiser.zero_grad()
        loss.backward()
        if sgd.clip is not None:
            nn.utils.clip_grad_norm_(moving, sgd.clip)
        before = [parameter.detach().clone() for parameter in moving]
        optimiser.step()
        with torch.no_grad():
            for parameter, old, anchor, mask in zip(moving, before, anchors, masks, strict=True):
                parameter.sub_(sgd.lr * strength * (old - anchor)).mul_(mask)
    if "representation" not in phase.update:
        for buffer, old in zip(net.buffers(), statistics, strict=True):
            buffer.copy_(old)
    return [q.detach() for q in net.parameters()], list(net.buffers()), total / seen


PHASES = {
    "plain": {},
    "head": {"update": HEAD, "stream": "head"},
    "head-eval": {"update": HEAD, "stream": "head", "frozen": "eval"},
    "body": {"update": BODY, "optimizer": SGD(0.1, momentum=0.5)},
    "momentum-decay-clip": {"optimizer": SGD(0.05, momentum=0.9, weight_decay=0.02, clip=0.3)},
    "head-clip": {"update": HEAD, "optimizer": SGD(0.05, clip=0.2)},
    "steps": {"amount": Steps(4), "optimizer": SGD(0.05, momentum=0.9)},
    "proximal": {"amount": Epochs(1), "optimizer": SGD(0.1, weight_decay=0.02)},
    "mask": {"optimizer": SGD(0.05, momentum=0.9, clip=0.5)},
}


@pytest.mark.parametrize("change", PHASES)
@pytest.mark.parametrize("net", ["mlp", "cnn", "batchnorm", "centred", "summed"])
def test_the_loop_is_plain_pytorch(problem, phase, small_nets, net, change):
    sizes = (7, 3, 9)
    factory = {**small_nets, "mlp": partial(mlp, hidden=(6,)), "cnn": NETS["cnn"]}[net]
    p = problem(factory, sizes=sizes)
    asked = phase(**PHASES[change])
    if change == "proximal":
        asked = phase(**PHASES[change], proximal=(p.anchor(), 0.8))
    if change == "mask":
        asked = phase(**PHASES[change], mask=p.mask())
    expectations = [reference(factory((1, 8, 8), CLASSES), p, asked, row) for row in range(len(sizes))]
    fit = p.engine("loop").fit(p.params, p.buffers, asked, ROUND)
    for row, (weights, statistics, loss) in enumerate(expectations):
        assert float(fit.loss[row]) == pytest.approx(loss, rel=1e-10)
        for (name, leaf), expected in zip(fit.params.items(), weights, strict=True):
            torch.testing.assert_close(leaf[row], expected, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        for (name, leaf), expected in zip(fit.buffers.items(), statistics, strict=True):
            torch.testing.assert_close(leaf[row], expected, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_clip_is_at_work(problem, phase):
    """The limits that these tests use do change something."""
    p = problem("mlp:6")
    free, clipped = (
        p.engine("loop").fit(p.params, p.buffers, phase(optimizer=SGD(0.05, clip=clip)), ROUND) for clip in (None, 0.5)
    )
    for name in p.params:
        assert not torch.allclose(free.params[name], clipped.params[name], rtol=1e-3), name


@pytest.mark.parametrize("net", ["batchnorm", "centred"])
def test_head_phases_leave_statistics_alone(problem, phase, net):
    p = problem(net)
    for frozen in ("train", "eval"):
        before = clone({**p.params, **p.buffers})
        fit = p.engine("loop").fit(p.params, p.buffers, phase(update=HEAD, frozen=frozen), ROUND)
        for name, leaf in before.items():
            assert torch.equal({**fit.params, **fit.buffers}[name], leaf) == (group(name) != "head"), name


def test_statistics_move_with_the_representation(problem, phase):
    p = problem("batchnorm")
    fit = p.engine("loop").fit(p.params, p.buffers, phase(update=BODY, amount=Epochs(1)), ROUND)
    counters = [leaf for name, leaf in fit.buffers.items() if name.endswith("num_batches_tracked")]
    # Batches of one are left out: 9 = 4 + 4 (+ 1), 5 = 4 (+ 1).
    assert [counter.tolist() for counter in counters] == [[2, 1, 2, 1, 3]] * 2
