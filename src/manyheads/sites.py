"""Sites: processes that keep their workers' data to themselves, and go on without one of them where they must."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.errors import Transient, UserError
from manyheads.json_text import fits, write_json
from manyheads.network.placement import Placement, blocks, owners
from manyheads.store.layout import SITE, read_object
from manyheads.units import numbered, plural


class Sites:
    """Who is where in a run over sites, who is away, and since when."""

    def __init__(self, placement: Placement, num_workers: int, timeout: float) -> None:
        self.placement, self.timeout = placement, timeout
        self.away = np.flatnonzero(owners(placement, num_workers) < 0).tolist()
        self.disturbances: list[str] = []
        """What made this run another than the one that was asked for, a line each."""
        self._since = dict.fromkeys(self.away, time.time())

    def resume_absences(self, folder: Path, workers: range, starts: Sequence[Mapping[str, Any]]) -> int:
        """Continue the record of who was away from earlier starts; gives the round that this start begins at.

        ``starts``: of each process the ``round`` of its state, and what its site has ``noted``: a site that was away
        itself learns from the others what happened meanwhile.
        """
        rounds = [start["round"] for start in starts]
        round = max(rounds)
        absences = [(int(who), seconds) for start in starts for who, seconds in start["away"].items()]
        for who, seconds in absences:
            if who in self._since:
                self._since[who] = min(time.time() - seconds, self._since[who])
        told = sorted((start["disturbances"] for start in starts), key=len, reverse=True)
        self.disturbances = list(dict.fromkeys(chain.from_iterable(told)))
        if self.away:
            self.disturbances.append(f"From round {round + 1} on {_were(self.away)} away.")
        elif absences:
            self.disturbances.append(f"From round {round + 1} on all workers were there again.")
        for behind, whose in zip(rounds, self.placement, strict=True):
            if behind < round:
                who, what = _workers(whose).capitalize(), f"the state of round {behind}" if behind else "first weights"
                self.disturbances.append(f"{who} went on in round {round + 1} with {what}.")
        kept = {"workers": [*workers], "away": self._since, "disturbances": self.disturbances}
        write_json(folder / SITE, kept)
        return round

    def overdue(self) -> bool:
        """Whether somebody has been away for too long."""
        return any(time.time() - since > self.timeout for since in self._since.values())

    def never_there(self, files: object) -> Transient:
        (first,) = whose((range(self.away[0], self.away[0] + 1),), str(files))
        return Transient(f"no process sees the file of {first}: start its site too, or give fewer --workers.")

    def may_have_ended(self) -> str:
        """What to tell the user of a site that returns and does not find all the others."""
        return (
            f"If {_workers(self.away)} ended the run while this site was away, stop this one and start all sites with"
            " more --rounds: what it trains without them is a result of its own."
        )

    def given_up(self) -> UserError:
        return UserError(
            f"{_were(self.away)} away for more than {self.timeout:g} s: start the site again and then this command, or"
            " give a longer --site-timeout."
        )


def refuse_others(folder: Path, workers: range) -> None:
    """Refuse a folder that was begun with other workers than this process has now."""
    earlier = _kept(folder)
    if earlier and earlier["workers"] != [*workers]:
        raise UserError(
            f"{folder} was begun with {_workers(earlier['workers'])}, and this process now has {_workers(workers)}:"
            " start the site with the files and as many processes as before, or choose another --out."
        )


def whose(placement: Placement, files: str) -> list[str]:
    """The workers of each process and their files, in words: ``files`` with the workers' numbers in it."""
    return [f"{_workers(workers)} ({_files(files, workers)})" for workers in placement]


def place(marked: Sequence[Mapping[str, str]]) -> Placement:
    """Who hosts whom, from the workers whose files each process sees, with the files' marks.

    A worker is where its file is. Processes that see the same files, on one host, share them out.
    """
    known: dict[str, str] = {}
    for worker, mark in (file for files in marked for file in files.items()):
        if known.setdefault(worker, mark) != mark:
            raise UserError(
                f"two sites have a file of worker {worker}, and not the same one: give every worker of all sites a"
                " number of its own, and --workers their sum."
            )
    seen = [[*map(int, files)] for files in marked]
    placement: dict[int, range] = {}
    taken: dict[int, int] = {}
    for files in dict.fromkeys(map(tuple, seen)):
        ranks = [rank for rank, others in enumerate(seen) if tuple(others) == files]
        # Messages name files, not ranks: that is how people know their sites.
        if not files:
            others = sorted({worker for files in seen for worker in files})
            who = f"a process sees no file, the others see those of {_workers(others)}" if others else "no file is here"
            raise UserError(
                f"{who} (of workers below --workers): put one where --data says, give more --workers, or start it"
                " elsewhere."
            )
        if files[-1] - files[0] + 1 != len(files):
            raise UserError(
                f"a process sees the files of {_workers(files)}: number the workers of a site consecutively."
            )
        if len(ranks) > len(files):
            # Said of these: another site reads it too.
            raise UserError(
                f"{len(ranks)} processes see the {plural('file', len(files))} of {_workers(files)}: start at most"
                f" {len(files)} there."
            )
        for worker in files:
            if taken.setdefault(worker, ranks[0]) != ranks[0]:
                raise UserError(
                    f"the file of worker {worker} is seen by a process that sees {_workers(seen[taken[worker]])} and"
                    f" by another that sees {_workers(files)}: a worker's file belongs to one site."
                )
        for rank, block in zip(ranks, blocks([1] * len(files), len(ranks)), strict=True):
            placement[rank] = range(files[0] + block.start, files[0] + block.stop)
    return tuple(placement[rank] for rank in range(len(seen)))


def resume_round(kept: Sequence[Sequence[int]]) -> int:
    """The round to go on from, from the rounds whose checkpoints each process has.

    The last round that all have. If there is none, some site was away for long, and goes on with the state it had: then
    it is the last round that most have, of those that no site has left behind and could not return to.
    """
    no_earlier = max((min(rounds) for rounds in kept if rounds), default=0)
    having = Counter(round for rounds in kept for round in set(rounds) if round >= no_earlier)
    return max(having, key=lambda round: (having[round], round), default=0)


def noted(folder: Path) -> dict[str, Any]:
    """Who has been away for how many seconds, and what disturbed the run, as a site has noted it at earlier starts.

    Not since when: the clocks of other sites may show another time.
    """
    earlier = _kept(folder) or {}
    away = {who: max(0.0, time.time() - since) for who, since in earlier.get("away", {}).items()}
    return {"away": away, "disturbances": earlier.get("disturbances", [])}


def _kept(folder: Path) -> dict[str, Any] | None:
    """What an earlier start has written to a site's folder; None: nothing."""
    path = folder / SITE
    kept = read_object(path)
    away = kept["away"] if kept else {}
    sound = kept and all(who.isdecimal() and fits(since, float) for who, since in away.items())
    if not sound and path.exists():
        raise UserError(f"{path} is damaged: put it back, or delete it, and with it the record of who was away.")
    return kept


def _files(files: str, workers: range) -> str:
    names = [files.replace("{worker}", str(worker)) for worker in (workers[0], workers[-1])]
    return names[0] if len(workers) == 1 else " to ".join(names)


def _workers(workers: Sequence[int]) -> str:
    return numbered("worker", workers)


def _were(workers: Sequence[int]) -> str:
    return f"{_workers(workers)} {'were' if len(workers) > 1 else 'was'}"
