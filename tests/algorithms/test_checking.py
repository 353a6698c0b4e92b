"""An algorithm of one's own that gives back what it must not: one line, in its first round."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from manyheads.algorithms import REGISTRY
from manyheads.algorithms.base import Algorithm, Context, State
from manyheads.algorithms.phases import WHOLE, train_whole
from manyheads.cli import options
from manyheads.cli.parser import Parser
from manyheads.engine.phase import Epochs
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.rounds import train


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


BROKEN = {
    "local gives no (State, Log): return both": {"local": lambda self, state, round, ctx: state},
    "local gives no (State, Log): return both, as": {"local": lambda self, state, round, ctx: (state, None)},
    ": leave shapes and types as they are": {
        "mix": lambda self, state, round, ctx: replace(state, params={n: p.float() for n, p in state.params.items()})
    },
    "models gives a NoneType: return a State": {"models": lambda self, state, ctx: None},
    "local gives a dict: return a State": {"local": lambda self, state, round, ctx: (state.params, {})},
    "mix gives a NoneType: return a State": {"mix": lambda self, state, round, ctx: None},
    "mix loses head.fc2.bias": {"mix": lambda self, state, round, ctx: without_head(state)},
    "mix adds track.x: a state has the leaves of its first": {
        "mix": lambda self, state, round, ctx: with_leaf(state, "track.x")
    },
    "models gives track.x that the net has not": {"init": lambda self, ctx: with_leaf(ctx.initial, "track.x")},
    "models gives head.fc2.bias not as the net has it": {"models": lambda self, state, ctx: without_head(state)},
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


def test_a_sound_one_passes(lab: SimpleNamespace) -> None:
    assert len(list(train(lab.tiny(Sound(), rounds=2), lab.cpu))) == 2


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
    r"models of Odd is no method: write def models\(self, state, ctx\)": {"models": None},
    "Odd has no name: give it one, as name: ClassVar": {"name": ""},
    "Odd has no title: give it one, as title: ClassVar": {"title": ""},
    "name of Odd has become an option: write name: ClassVar": {"name": "odd", "__annotations__": {"name": str}},
    "private of Odd has become an option: write private: ClassVar": {"__annotations__": {"private": frozenset[str]}},
    r"private of Odd 'head' is of the wrong type: give a frozenset such as frozenset\(\{'head'\}\)": {
        "private": "head"
    },
    "row_stochastic of Odd 'no' is of the wrong type: give bool": {"row_stochastic": "no"},
    "unknown order of Odd 'mix_train'. Did you mean 'mix-train'": {"order": "mix_train"},
    "lr, an option of Odd, is one of every run's: call it otherwise": {"lr": 0.1, "__annotations__": {"lr": float}},
    "out, an option of Odd, is one of every run's: call it otherwise": {"out": "x", "__annotations__": {"out": str}},
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


def test_a_class_that_is_no_dataclass() -> None:
    class Plain(Algorithm):
        name = title = "plain"
        local = mix = Sound.local

    with pytest.raises(UserError, match=r"Plain is no dataclass: write @dataclass\(frozen=True, kw_only=True\) above"):
        Experiment(algorithm=Plain())
