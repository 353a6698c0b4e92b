"""A comparison: what its runs share, what is run once, and what it is called."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from manyheads.algorithms import DPSGD, REGISTRY
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.grid import distinct, labels, plan
from manyheads.tune import tunings

ONE = Runtime(device="cpu", threads=1)


def test_all_share_partition_graph_and_first_weights(lab: SimpleNamespace) -> None:
    data = lab.blobs(workers=4)
    sessions = [
        lab.opened(lab.tiny(kind(), data=data, split="iid", graph="random:0.5", seed=7)) for kind in REGISTRY.values()
    ]
    first = sessions[0]
    other = lab.opened(replace(first.experiment, seed=8))
    assert lab.held(other.everyone) != lab.held(first.everyone)
    weights = next(name for name in first.ctx.initial.params if name.startswith("head."))
    assert not torch.equal(other.ctx.initial.params[weights], first.ctx.initial.params[weights])
    for session in sessions[1:]:
        assert lab.held(session.everyone) == lab.held(first.everyone)
        for name, leaf in first.ctx.initial.params.items():
            assert torch.equal(session.ctx.initial.params[name], leaf)
    on_graph = [session for session in sessions if session.experiment.graph == "random:0.5"]
    assert {"deprl", "d-psgd", "dispfl"} <= {session.experiment.algorithm.name for session in on_graph}
    for session in on_graph:
        assert np.array_equal(session.mixing.rows(0).dense() > 0, first.mixing.rows(0).dense() > 0)


def test_a_graph_that_one_seed_cannot_draw_shows_before_anything_is_run(lab: SimpleNamespace) -> None:
    few = [
        lab.tiny(DPSGD(), graph="random:0.11", workers=16, data="digits", split="iid", seed=seed) for seed in (1, 31)
    ]
    assert len(distinct(few[:1], ONE)) == 1
    with pytest.raises(UserError, match=r"random:0\.11"):
        distinct(few, ONE)


def test_of_several_graphs_the_random_ones_are_redrawn(lab: SimpleNamespace) -> None:
    def asked(*graphs: str) -> list[tuple[str, str, bool]]:
        every = [
            lab.tiny(REGISTRY[name](), graph=graph, redraw=True) for name in ("deprl", "fedavg") for graph in graphs
        ]
        return [(each.algorithm.name, each.graph, each.redraw) for each in distinct(every, ONE)]

    redrawn = ("deprl", "random:0.5", True)
    assert asked("ring", "random:0.5") == [("deprl", "ring", False), redrawn, ("fedavg", "server", False)]
    with pytest.raises(UserError, match=r"^ring is not random: leave out --redraw"):
        asked("ring", "full")


def test_what_an_algorithm_does_not_look_at_makes_no_second_run(lab: SimpleNamespace) -> None:
    asked = [
        lab.tiny(REGISTRY[name](), graph=graph, link_failure=0.1 * (graph == "full"), weights=weights, seed=seed)
        for name in ("deprl", "fedavg", "local")
        for graph in ("ring", "full")
        for weights in (None, "metropolis")
        for seed in (1, 2, 2)
    ]
    found = distinct(asked, ONE)
    assert [(e.algorithm.name, e.graph, e.seed) for e in found] == [
        ("deprl", "ring", 1),
        ("deprl", "ring", 2),
        ("deprl", "full", 1),
        ("deprl", "full", 2),
        ("fedavg", "server", 1),
        ("fedavg", "server", 2),
        ("local", "none", 1),
        ("local", "none", 2),
    ]
    full = "deprl, graph full, link failure 0.1"
    assert labels(found)[2:5] == [f"{full}, seed 1", f"{full}, seed 2", "fedavg, seed 1"]
    assert labels(found[::4]) == ["deprl", "fedavg"]


def test_values_are_called_what_results_call_them(lab: SimpleNamespace) -> None:
    relabelled = [lab.tiny(REGISTRY["deprl"](), relabel=relabel) for relabel in (False, True)]
    assert labels(relabelled) == ["deprl, relabel no", "deprl, relabel yes"]


def test_what_does_not_go_together_shows_before_anything_is_run(lab: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="the head is the whole net, so deprl would share nothing"):
        distinct([lab.tiny(REGISTRY[name](), head="fc1") for name in ("d-psgd", "deprl")], ONE)


def test_a_measurement_that_one_of_them_does_not_allow_shows_before_anything_is_run(lab: SimpleNamespace) -> None:
    both = [lab.tiny(REGISTRY[name]()) for name in ("deprl", "fedrod")]
    assert len(distinct(both, lab.cpu)) == len(distinct(both[:1], replace(lab.cpu, theory_every=1))) + 1
    with pytest.raises(UserError, match="--theory-every needs a net with one head"):
        distinct(both, replace(lab.cpu, theory_every=1))


def test_rates_that_nobody_has_samples_for_are_not_tuned(lab: SimpleNamespace) -> None:
    few = lab.tiny(REGISTRY["deprl"](), validation=0.01)
    assert len(distinct([few], ONE)) == 1
    with pytest.raises(UserError, match=r"^--validation 0\.01 leaves no worker a sample to tune on: give more\.$"):
        distinct([few], ONE, tuned=True)


def test_one_run_cannot_end_twice(lab: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="--rounds 3 and 5: give one number"):
        distinct([lab.tiny(REGISTRY["local"](), rounds=rounds) for rounds in (3, 5)], ONE)


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        plan([], tmp_path / "file")
    (tmp_path / "experiment.json").touch()
    with pytest.raises(UserError, match="holds a single run"):
        plan([], tmp_path)


def test_an_option_of_ones_own_algorithm_may_be_a_list(lab: SimpleNamespace) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Scheduled(DPSGD):
        name: ClassVar[str] = "scheduled"
        title: ClassVar[str] = "Scheduled"
        rates: list[float] = field(default_factory=list)

    asked = [lab.tiny(Scheduled(rates=rates), seed=seed) for rates in ([0.1], [0.2]) for seed in (1, 2)]
    assert len(distinct(asked, ONE)) == 4
    with pytest.raises(UserError, match="several are given"):
        tunings([replace(one, lr=lr, validation=0.3) for one in asked for lr in (0.1, 0.2)], (0.5, 1.0), Path("tuning"))
