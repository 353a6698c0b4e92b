"""An algorithm of one's own with the whole command line: FedPer without a server.

A round: every worker trains its whole net, and then mixes the representation with its neighbours. Heads stay private.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms import REGISTRY
from manyheads.algorithms.base import Algorithm, Context, Log, State, amount
from manyheads.algorithms.phases import REPRESENTATION, train_whole
from manyheads.cli import main


@dataclass(frozen=True, kw_only=True)
class DFedPer(Algorithm):
    epochs: int = 3
    """Passes over the local samples."""
    steps: int | None = None
    """Mini-batch steps, instead of passes."""

    name: ClassVar[str] = "dfedper"
    title: ClassVar[str] = "DFedPer"
    private: ClassVar[frozenset[str]] = frozenset({"head"})

    def local(self, state: State, round: int, ctx: Context) -> tuple[State, Log]:
        return train_whole(state, round, ctx, amount(self.epochs, self.steps), ctx.present(round))

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return ctx.mix(state, REPRESENTATION, round)


REGISTRY[DFedPer.name] = DFedPer

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
