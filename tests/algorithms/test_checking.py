"""An algorithm of one's own that gives back what it must not: one line, in its first round."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from manyheads.algorithms import REGISTRY, attribute_of
from manyheads.algorithms.base import Algorithm, Context, State, Work
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.cli import options
from manyheads.cli.parser import Parser
from manyheads.derived import usual_options
from manyheads.engine.phase import Epochs
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.rounds import train
from manyheads.tree import clone, select


@dataclass(frozen=True, kw_only=True)
class Sound(Algorithm):
    """Whole models, mixed; what the tests break lies in its methods."""

    name: ClassVar[str] = "sound"
    title: ClassVar[str] = "Sound"

    def local(self, state: State, round: int, ctx: Context) -> Any:
        return train_whole(state, round, ctx, Epochs(1), None)

    def mix(self, state: State, round: int, ctx: Context) -> Any:
        return ctx.mix(state, WHOLE, round)


def with_leaf(state: State, name: str) -> State:
    leaf = next(iter(state.params.values()))
    return replace(state, params={**state.params, name: leaf})


def without_head(state: State) -> State:
    return replace(state, params={name: leaf for name, leaf in state.params.items() if not name.startswith("head.")})


def in_place(self: Algorithm, state: State, round: int, ctx: Context) -> State:
    mixed = ctx.network.mix(state.params, round)
    for name, leaf in state.params.items():
        leaf.copy_(mixed[name])
    return state


def logged(loss: Any, steps: Any) -> dict[str, Any]:
    return {"local": lambda self, state, round, ctx: (state, {"body": Work(loss, steps)})}


def net_only(self: Algorithm, state: State, ctx: Context) -> State:
    return replace(state, params=select(state.params, WHOLE))


def begun_with(leaf: Any) -> dict[str, Any]:
    return {
        "init": lambda self, ctx: replace(ctx.initial, params={**ctx.initial.params, "more.x": leaf}),
        "models": net_only,
    }


BROKEN = {
    "init returns a NoneType: return a State": {"init": lambda self, ctx: None},
    "init fails in ": {"init": lambda self, ctx: {}["x"]},
    "init returns more.x [7, 3]: give it a row for each of the 4 workers here, [4, ...]": begun_with(torch.zeros(7, 3)),
    "init returns more.x []: give it a row for each": begun_with(torch.tensor(0.5)),
    "init returns more.x in torch.complex64, which a checkpoint cannot hold: give it another type": begun_with(
        torch.zeros(4, 2, dtype=torch.complex64)
    ),
    "init returns a State whose params are not tensors by name: give a dict": begun_with(np.zeros((4, 3))),
    "init returns a State whose buffers are not tensors by name": {
        "init": lambda self, ctx: State(ctx.initial.params, None)  # pyright: ignore[reportArgumentType]
    },
    "init draws from torch's, numpy's or Python's own generator": {
        "init": lambda self, ctx: [torch.rand(3), ctx.initial][1]
    },
    "local draws from torch's, numpy's or Python's own generator, so no run could be repeated: draw from manyheads.": {
        "local": lambda self, state, round, ctx: (state, [random.random(), {}][1])
    },
    "mix draws from torch's, numpy's or Python's own": {
        "mix": lambda self, state, round, ctx: [np.random.rand(), state][1]  # noqa: NPY002 (it is to be refused)
    },
    "prepare returns a Linear: return a Split": {"prepare": lambda self, model: nn.Linear(2, 2)},
    "prepare fails in ": {"prepare": lambda self, model: {}["x"]},
    "models returns head.fc2.bias not as the net has it, torch.float64 [4, 3]: return": {
        "models": lambda self, state, ctx: replace(state, params={n: p[:1] for n, p in state.params.items()})
    },
    "models returns head.fc2.bias not as the net has it, torch.float64": {
        "models": lambda self, state, ctx: replace(state, params={n: p.float() for n, p in state.params.items()})
    },
    "local returns a State whose params are not tensors by name": {
        "local": lambda self, state, round, ctx: (replace(state, params=None), {})
    },
    "with requires_grad=True: detach() it": {
        "mix": lambda self, state, round, ctx: replace(
            state, params={name: leaf.clone().requires_grad_() for name, leaf in state.params.items()}
        )
    },
    "log in which 'body' has no loss for each of the 4 workers here: give a tensor [4] of floats": logged(
        torch.tensor(0.5), torch.ones(4, dtype=torch.int64)
    ),
    "log in which 'body' has no steps for each of the 4 workers here: give a tensor [4] of int64": logged(
        torch.ones(4), torch.ones(4)
    ),
    "local does not return (State, Log): return both": {"local": lambda self, state, round, ctx: state},
    "local does not return (State, Log): return both, as": {"local": lambda self, state, round, ctx: (state, None)},
    ": leave shapes and types as they are": {
        "mix": lambda self, state, round, ctx: replace(state, params={n: p.float() for n, p in state.params.items()})
    },
    "models returns a NoneType: return a State": {"models": lambda self, state, ctx: None},
    "local returns a dict: return a State": {"local": lambda self, state, round, ctx: (state.params, {})},
    "mix returns a NoneType: return a State": {"mix": lambda self, state, round, ctx: None},
    "mix loses head.fc2.bias": {"mix": lambda self, state, round, ctx: without_head(state)},
    "mix adds track.x: a state must keep the leaves it started with": {
        "mix": lambda self, state, round, ctx: with_leaf(state, "track.x")
    },
    "models returns track.x that the net does not have": {"init": lambda self, ctx: with_leaf(ctx.initial, "track.x")},
    "models returns head.fc2.bias not as the net has it": {"models": lambda self, state, ctx: without_head(state)},
    "unknown private group of sound 'heads'. Did you mean 'head'?": {"private": frozenset({"heads"})},
    "unknown group 'represetation'. Did you mean 'representation'?": {
        "mix": lambda self, state, round, ctx: ctx.mix(state, {"represetation"}, round)
    },
    "unknown group 'haed'. Did you mean 'head'?": {
        "local": lambda self, state, round, ctx: ctx.average(state, {"haed"}, ctx.sizes)
    },
}


@pytest.mark.parametrize("says", BROKEN)
@pytest.mark.parametrize("order", ["train-mix", "mix-train"])
def test_mistakes_are_told_in_the_first_round(lab: SimpleNamespace, says: str, order: str) -> None:
    kind = dataclass(frozen=True, kw_only=True)(type("Broken", (Sound,), {"order": order, **BROKEN[says]}))
    with pytest.raises(UserError) as error:
        list(train(lab.tiny(kind(), rounds=1), lab.cpu))
    assert says in str(error.value)


@pytest.mark.parametrize("order", ["train-mix", "mix-train"])
def test_a_state_is_not_changed_in_place(lab: SimpleNamespace, order: str) -> None:
    """What it was before mixing is scored afterwards."""
    kind = dataclass(frozen=True, kw_only=True)(type("Broken", (Sound,), {"order": order, "mix": in_place}))
    own = {"init": lambda self, ctx: State(clone(ctx.initial.params), ctx.initial.buffers)}
    kind = dataclass(frozen=True, kw_only=True)(type("Broken", (kind,), own))
    with pytest.raises(UserError, match=r"mix changes representation\.fc1\.weight in place, .*: return a new tensor"):
        list(train(lab.tiny(kind(), rounds=1), lab.cpu))


def test_work_that_nobody_would_count_is_refused(lab: SimpleNamespace) -> None:
    """It would take no simulated time."""

    def made(local: Any, **held: Any) -> Algorithm:
        return dataclass(frozen=True, kw_only=True)(type("Broken", (Sound,), {"local": local, **held}))()

    def silent(self: Algorithm, state: State, round: int, ctx: Context) -> Any:
        return train_whole(state, round, ctx, Epochs(1), None)[0], {}

    def idle(self: Algorithm, state: State, round: int, ctx: Context) -> Any:
        return train_whole(state, round, ctx, Epochs(0), None)

    says = r"^sound: local moves .*fc1\.weight, but its log is empty, so .* no simulated time: return the log of"
    for order in ("train-mix", "mix-train"):
        with pytest.raises(UserError, match=says):
            list(train(lab.tiny(made(silent, order=order), rounds=1), lab.cpu))
    assert list(train(lab.tiny(made(idle), rounds=1), lab.cpu)), "nothing moves"


def test_a_sound_one_passes(lab: SimpleNamespace) -> None:
    assert len(list(train(lab.tiny(Sound(), rounds=2), lab.cpu))) == 2


def test_nobody_is_blamed_for_what_another_thread_draws(lab: SimpleNamespace) -> None:
    """Runs in threads, each of which makes its net: one is made while another run is in its first round."""

    @dataclass(frozen=True, kw_only=True)
    class Beside(Sound):
        def local(self, state: State, round: int, ctx: Context) -> Any:
            with ThreadPoolExecutor(1) as other:
                other.submit(nn.Linear, 2, 2).result()
            return super().local(state, round, ctx)

    with ThreadPoolExecutor(1) as thread:
        assert len(thread.submit(list, train(lab.tiny(Beside(), rounds=1), lab.cpu)).result()) == 1


def test_a_phase_names_groups_that_there_are(lab: SimpleNamespace) -> None:
    ctx = lab.opened(lab.tiny(Sound())).ctx
    state = with_leaf(ctx.initial, "track.x")
    assert ctx.known({"track", "head", "representation"}, state) == {"track", "head", "representation"}
    with pytest.raises(UserError, match=r"unknown group .body.\. Allowed: head, representation, track"):
        ctx.known({"body"}, state)


def test_whom_it_exchanges_with_is_one_of_three() -> None:
    with pytest.raises(UserError, match=r"unknown exchange of Odd 'sever'\. Did you mean 'server'"):
        Experiment(algorithm=dataclass(frozen=True, kw_only=True)(type("Odd", (Sound,), {"exchange": "sever"}))())


MISTAKEN = {
    r"mix of Odd takes \(self, state, ctx\): write def mix\(self, state, round, ctx\)": {
        "mix": lambda self, state, ctx: state
    },
    r"local of Odd takes \(self\): write def local\(self, state, round, ctx\)": {"local": lambda self: None},
    r"init of Odd takes \(self, ctx, more\): write def init\(self, ctx\)": {
        "init": lambda self, ctx, more: ctx.initial
    },
    r"models of Odd is not a method: write def models\(self, state, ctx\)": {"models": None},
    "Odd has no name: give it one, such as name: ClassVar": {"name": ""},
    "Odd has no title: give it one, such as title: ClassVar": {"title": ""},
    **{
        rf"name of Odd '{re.escape(name)}' will not do for commands and folders: give lower-case letters": {
            "name": name
        }
        for name in ("a/b", "two words", "Upper", "-x", ".x", "..", "ä", "x*", "x,y")
    },
    "Odd has the name of another algorithm, 'join': give it its own": {"name": "join"},
    "name of Odd is declared as an option: write name: ClassVar": {"name": "odd", "__annotations__": {"name": str}},
    "private of Odd is declared as an option: write private: ClassVar": {
        "__annotations__": {"private": frozenset[str]}
    },
    r"private of Odd 'head' is of the wrong type: give a frozenset such as frozenset\(\{'head'\}\)": {
        "private": "head"
    },
    "row_stochastic of Odd 'no' is of the wrong type: give bool": {"row_stochastic": "no"},
    "unknown order of Odd 'mix_train'. Did you mean 'mix-train'": {"order": "mix_train"},
    "Odd has an option called lr, which every run already has: rename it": {
        "lr": 0.1,
        "__annotations__": {"lr": float},
    },
    "Odd has an option called out, which every run already has: rename it": {
        "out": "x",
        "__annotations__": {"out": str},
    },
}


@pytest.mark.parametrize("says", MISTAKEN)
def test_mistakes_in_a_class_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """To whoever gives it in Python, and to whoever registers it for the command line."""
    kind: type[Algorithm] = dataclass(frozen=True, kw_only=True)(type("Odd", (Sound,), MISTAKEN[says]))
    with pytest.raises(UserError, match=says):
        Experiment(algorithm=kind())
    monkeypatch.setitem(REGISTRY, kind.name, kind)
    with pytest.raises(UserError, match=says):
        options.add_options(Parser())


@pytest.mark.parametrize("name", ["x", "2nd", "d-psgd-2", "fed_per", "fedper-1.5"])
def test_names_that_make_folders_are_taken(name: str) -> None:
    kind = dataclass(frozen=True, kw_only=True)(type("Even", (Sound,), {"name": name}))
    assert Experiment(algorithm=kind()).algorithm.name == name


@pytest.mark.parametrize(("given", "what"), [(Sound(), r"\(Sound\)"), (dict, "<class 'dict'>"), ("sound", "'sound'")])
def test_what_is_registered_is_a_class(monkeypatch: pytest.MonkeyPatch, given: Any, what: str) -> None:
    monkeypatch.setitem(REGISTRY, "sound", given)
    says = rf"^REGISTRY\['sound'\] is {what}, which is no class of an algorithm: register the class itself, as in REG"
    for use in (
        lambda: options.add_options(Parser()),
        lambda: Experiment.from_json('{"algorithm": {"name": "sound"}}'),
        lambda: attribute_of("sound", {}, "num_models"),
        lambda: Experiment(algorithm=Sound()),
    ):
        with pytest.raises(UserError, match=says):
            use()


def test_what_is_private_may_be_a_plain_set_and_methods_static(lab: SimpleNamespace) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Plain(Sound):
        private: ClassVar[Any] = {"head"}

        @staticmethod
        def models(state, ctx):  # pyright: ignore[reportIncompatibleMethodOverride]
            return state

    with pytest.raises(UserError, match="is private to its worker"):
        list(train(lab.tiny(Plain(), rounds=1), lab.cpu))


def test_a_property_may_say_what_is_private(lab: SimpleNamespace) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Choosing(Sound):
        share: bool = True

        @property
        def private(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
            return frozenset() if self.share else frozenset({"head"})

    assert list(train(lab.tiny(Choosing(), rounds=1), lab.cpu))
    with pytest.raises(UserError, match="is private to its worker"):
        list(train(lab.tiny(Choosing(share=False), rounds=1), lab.cpu))


def test_a_class_that_is_no_frozen_dataclass() -> None:
    """Its options would be none, or what it remembers in itself would be in no checkpoint."""

    class Plain(Algorithm):
        name = title = "plain"
        local = mix = Sound.local

    class Undecorated(Sound):
        strength: float = 0.1

    @dataclass(kw_only=True)
    class Thawed(Algorithm):
        name = title = "thawed"
        local = mix = Sound.local

    for kind in (Plain, Undecorated, Thawed):
        says = rf"{kind.__name__} is not a frozen dataclass: write @dataclass\(frozen=True, kw_only=True\) above it"
        with pytest.raises(UserError, match=says):
            Experiment(algorithm=kind())


@dataclass(frozen=True, kw_only=True)
class Picky(Sound):
    every: int = 1
    """It fails with any other."""

    name: ClassVar[str] = "picky"

    def __post_init__(self) -> None:
        super().__post_init__()
        {1: "every round"}[self.every]

    @property
    def uses_sizes(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Broken(Picky):
    every: int = 2


def on_the_command_line() -> None:
    parser = Parser()
    options.add_options(parser)
    options.experiments(parser.parse(["picky", "--every", "2"]))


def in_a_file() -> None:
    Experiment.from_json(Experiment(algorithm=Picky()).to_json().replace('"every": 1', '"every": 2'))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (on_the_command_line, r"Picky\(every=2\)"),
        (in_a_file, r"Picky\(every=2\)"),
        (lambda: attribute_of("picky", {"every": 2}, "uses_sizes"), r"Picky\(every=2\)"),
        (lambda: usual_options({}, Broken), r"Broken\(\)"),
    ],
    ids=["command line", "file", "report", "inspect run"],
)
def test_options_that_an_own_algorithm_fails_with_are_told_in_one_line(monkeypatch, make, says):
    monkeypatch.setitem(REGISTRY, "picky", Picky)
    with pytest.raises(UserError, match=rf"^{says} fails in {__file__}, line \d+: KeyError: 2$"):
        make()
