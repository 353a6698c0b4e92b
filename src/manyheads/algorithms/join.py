"""Joining: new workers take a learned representation as it is and train heads of their own on it.

A round of worker i: one pass over its own samples moves its head, which starts fresh; the representation is frozen.
Nothing is sent. This is how the paper tests whether a representation serves workers that had no part in it; of a net
that was learned without a head of its own the last layer is relearned.

``manyheads.join`` makes such runs out of finished ones, so that it is in no list of algorithms.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.algorithms.base import Algorithm, Context, Exchange, Log, State, run_phases
from manyheads.algorithms.phases import HEAD, WHOLE
from manyheads.engine.phase import Epochs, Phase


@dataclass(frozen=True, kw_only=True)
class Join(Algorithm):
    learned_by: str = ""
    """The algorithm of the run that learned the representation."""
    teacher: str = ""
    """Id of that run but for its seed, and its rounds."""
    learned: str = ""
    """A fingerprint of the representation itself."""
    representation: Literal["own", "mean"] = "own"
    """Whether worker i takes that of worker i mod N, or the mean of all."""
    frozen: Literal["train", "eval"] = "train"
    """Mode of the representation while heads train."""

    name: ClassVar[str] = "join"
    title: ClassVar[str] = "New workers"
    private: ClassVar[frozenset[str]] = WHOLE
    exchange: ClassVar[Exchange] = "none"
    provenance: ClassVar[frozenset[str]] = frozenset({"learned"})
    # Without it, as many new workers with the run's seed would hold the same samples as the run's workers.
    stream: ClassVar[str] = "join"

    @property
    def head_passes(self) -> int:
        return 1

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        sgd, passes = ctx.rates.sgd(round, head=True), Epochs(self.head_passes)
        phase = Phase("head", HEAD, passes, sgd, ctx.objective, frozen=self.frozen)
        return run_phases(state, [phase], round, ctx, ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return state
