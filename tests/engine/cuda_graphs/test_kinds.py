"""Which phases share a recording."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from manyheads.engine.cuda_graphs.kinds import bare, kind, meaning
from manyheads.engine.phase import SGD, Epochs, Phase, Steps, cross_entropy, single_head

WHOLE = frozenset({"representation", "head"})
ONCE = Epochs(1)


def make_phase(amount: Epochs | Steps = ONCE, **options) -> Phase:
    return Phase("body", WHOLE, amount, SGD(0.1, 0.9), single_head(cross_entropy), **options)


def test_phases_share_recordings_when_only_rates_and_tensors_differ() -> None:
    first = make_phase(constants={"c": torch.ones(3, 2)}, mask={"head.w": torch.ones(3)})
    again = Phase(
        "head",
        WHOLE,
        Epochs(1),
        SGD(0.05, 0.9),
        single_head(cross_entropy),
        {"c": torch.zeros(5, 2)},
        mask={"head.w": torch.zeros(5)},
    )
    assert kind(first) == kind(again)
    for other in (
        make_phase(),
        make_phase(constants=first.constants, mask={}),
        replace(first, amount=Epochs(2)),
        replace(first, optimizer=SGD(0.1, 0.8)),
        replace(first, objective=single_head(lambda o, y: o.sum(1))),
    ):
        assert kind(other) != kind(first)
    held = bare(first)
    assert kind(held) == kind(first)
    assert held.constants["c"].numel() == 2 and held.mask is not None and held.mask["head.w"].numel() == 0


def test_meaning_looks_into_closures() -> None:
    def make(number: float, thing: object):
        return lambda x: (x, number, thing)

    thing = object()
    assert meaning(make(1.0, thing)) == meaning(make(1.0, thing))
    assert meaning(make(1.0, thing)) != meaning(make(2.0, thing))
    assert meaning(make(1.0, thing)) != meaning(make(1.0, object()))


def test_meaning_looks_at_defaults() -> None:
    def make(first: float, named: float):
        return lambda x, first=first, *, named=named: (x, first, named)

    assert meaning(make(1.0, 2.0)) == meaning(make(1.0, 2.0))
    assert len({meaning(make(*numbers)) for numbers in ((1.0, 2.0), (3.0, 2.0), (1.0, 3.0))}) == 3


def test_meaning_looks_into_partial_functions() -> None:
    def loss(x: float, factor: float, *, held: dict) -> tuple:
        return x, factor, held

    held = {"rate": 1.0}
    first = meaning(partial(loss, factor=2.0, held=held))
    assert first == meaning(partial(loss, factor=2.0, held=held)), "made anew in every round"
    assert first != meaning(partial(loss, factor=3.0, held=held))
    held["rate"] = 2.0
    assert first != meaning(partial(loss, factor=2.0, held=held))


def test_meaning_looks_at_what_lies_deeper_and_comes_to_an_end() -> None:
    options = SimpleNamespace(factor=1.0, inner=[SimpleNamespace(depth=1)])
    options.itself = options

    class Objective:
        def __init__(self) -> None:
            self.options = options

        def __call__(self, x: float) -> float:
            return self.options.factor * x

    objective = Objective()
    first = meaning(objective)
    assert first == meaning(objective)
    options.inner[0].depth = 2
    second = meaning(objective)
    options.factor = 3.0
    assert len({first, second, meaning(objective)}) == 3
