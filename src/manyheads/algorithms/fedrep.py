"""FedRep: a shared representation averaged by a server, private heads.

A round: the server sends phi to the workers that take part; each trains its head on the frozen phi for
``head_epochs`` passes, then phi under its head for ``body_epochs`` passes; the server averages the representations.

Sent: phi up and down, by those who take part. The head never leaves its worker.

Reference: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
Differences: two optimisers instead of one, so that a frozen part really stays put; no extra head-only round at the
end; all workers take part by default.
"""

from dataclasses import dataclass
from typing import ClassVar

from manyheads.algorithms.base import Context, State
from manyheads.algorithms.personal_heads import PersonalHeads
from manyheads.algorithms.phases import REPRESENTATION
from manyheads.algorithms.server import ServerAlgorithm


@dataclass(frozen=True, kw_only=True)
class FedRep(ServerAlgorithm, PersonalHeads):
    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"

    def mix(self, state: State, round: int, ctx: Context) -> State:
        return self.average(state, REPRESENTATION, round, ctx)
