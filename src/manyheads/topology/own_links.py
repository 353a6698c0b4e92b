"""A user's own graph, link by link: ``links:0-1,1-2``, with weights ``links:0-1=0.3``, by round ``links:0-1/1-2``."""

import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from manyheads.errors import UserError

EXAMPLE = "links:0-1,1-2,0-2"
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?:=([0-9.e-]{1,30}))?")
_SHOWN_LINKS = 4
_MOST = 1 + 1e-6
"""The most that a worker's weights may sum to: slightly above 1, for a matrix that was once in float32."""


@dataclass(frozen=True)
class Link:
    """Two workers who hear each other, and with which weight."""

    one: int
    other: int
    weight: float | None = None
    """Its entry in P; None: as the weights' rule says."""

    @property
    def ends(self) -> tuple[int, int]:
        return self.one, self.other

    def __str__(self) -> str:
        return f"{self.one}-{self.other}" + ("" if self.weight is None else f"={self.weight!r}")


@dataclass(frozen=True)
class OwnLinks:
    """The links of each round of a period, each of them once, in order."""

    rounds: tuple[tuple[Link, ...], ...]

    def __str__(self) -> str:
        """For people: the first few, and a hash that tells them from others that begin alike."""
        total = sum(map(len, self.rounds))
        if total <= _SHOWN_LINKS:
            return self.spec
        shown, num_rounds = ",".join(map(str, self.rounds[0][:_SHOWN_LINKS])), len(self.rounds)
        many = f"{total} in {num_rounds} rounds" if num_rounds > 1 else str(total)
        return f"links:{shown},... ({many}, {sha256(self.spec.encode()).hexdigest()[:4]})"

    @property
    def spec(self) -> str:
        """The canonical text of these links, whichever way they were written."""
        return "links:" + "/".join(",".join(map(str, links)) for links in self.rounds)

    @property
    def weighted(self) -> bool:
        """Whether the links come with weights of their own."""
        return self.rounds[0][0].weight is not None

    @property
    def balanced(self) -> bool:
        """Whether uniform weights are doubly stochastic: in a round all who have links have equally many."""
        return all(len(set(_sums(links).values())) == 1 for links in self.rounds)

    def check(self, num_workers: int) -> None:
        """Refuse links to workers that do not exist, and weights that leave a negative one for the worker itself."""
        for links in self.rounds:
            for link in links:
                if link.one == link.other or link.other >= num_workers:
                    raise UserError(
                        f"graph {self}: {link} does not link two of the workers 0 to {num_workers - 1}: link others, or"
                        " ask for more --workers."
                    )
            if self.weighted:
                worker, total = max(_sums(links).items(), key=lambda item: item[1])
                if total > _MOST:
                    raise UserError(f"graph {self}: worker {worker}'s weights come to {total:.9g}: give at most 1.")

    def arrays(self, round: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(one end, the other, weight or None) of the links of a round, each [links]."""
        links = self.rounds[round]
        ends = np.array([link.ends for link in links], dtype=np.int64)
        return ends[:, 0], ends[:, 1], np.array([link.weight for link in links]) if self.weighted else None


def parse_links(text: str) -> OwnLinks:
    """Read what follows ``links:``; a link may be named more than once, in any order and direction."""
    try:
        rounds = [{_parse(link) for link in part.split(",")} for part in text.split("/")]
    except ValueError:
        raise UserError(
            f"graph 'links:{text[:40]}': give pairs of workers, as in '{EXAMPLE}', or with weights above 0"
            " and up to 1, 'links:0-1=0.3,1-2=0.5', and separate one round's links from the next's with '/'."
        ) from None
    own = OwnLinks(tuple(tuple(sorted(links, key=lambda link: link.ends)) for links in rounds))
    if len({link.weight is None for links in own.rounds for link in links}) > 1:
        raise UserError(f"graph {own}: only some of the links have a weight: give one to all or to none.")
    for links in own.rounds:
        for link, times in Counter(link.ends for link in links).items():
            if times > 1:
                raise UserError(f"graph {own}: {link[0]}-{link[1]} has two weights in a round: give one.")
    return own


def _parse(text: str) -> Link:
    found = _LINK.fullmatch(text)
    if found is None:
        raise ValueError
    weight = None if found[3] is None else float(found[3])
    if weight is not None and not 0 < weight <= _MOST:
        raise ValueError
    one, other = sorted((int(found[1]), int(found[2])))
    return Link(one, other, weight)


def _sums(links: tuple[Link, ...]) -> dict[int, float]:
    """Worker -> the sum of its links' weights, or their number where they have none."""
    sums: dict[int, float] = {}
    for link in links:
        for worker in link.ends:
            sums[worker] = sums.get(worker, 0) + (1 if link.weight is None else link.weight)
    return sums
