"""The rates that were tried before a comparison, and what each scored on the held-out samples."""

import json
from dataclasses import dataclass

from manyheads.report.collect import Finished, rejected
from manyheads.report.comparison import Comparison
from manyheads.store.layout import TUNING

_RATES = ("lr", "head_lr")
_SCORE = "accuracy_validation"


@dataclass(frozen=True)
class Tried:
    """One pair of rates of a system in a setting."""

    system: str
    setting: str
    lr: float
    head_lr: float
    score: float | None
    """Validation accuracy after the last round, of the seed that rates were chosen with; None: there was no such."""
    chosen: bool


def tried(comparison: Comparison) -> list[Tried]:
    """Every pair that the last tuning tried, system by system and the lowest rates first; nothing without one."""
    others: dict[str, list[Finished]] = {}
    for run in rejected(comparison.folder):
        # Deeper lie the runs of tunings before, with other factors or another seed.
        unscored = run.summary and run.summary.get(_SCORE) is None
        if run.path.parent == comparison.folder / TUNING and not unscored:
            others.setdefault(_but_for_rates(run), []).append(run)
    found = []
    for (i, j), runs in sorted(comparison.cells.items()):
        for run in runs:
            # A system that does not look at the grid has the same run in every setting.
            beside = others.pop(_but_for_rates(run), [])
            if not beside or not _best(run, beside):
                continue
            pairs = sorted([(run, True), *((one, False) for one in beside)], key=lambda pair: pair[0].options["lr"])
            label, setting = comparison.systems[i].label, str(comparison.settings[j])
            found += [
                Tried(label, setting, one.options["lr"], one.options["head_lr"], one.summary.get(_SCORE), chosen)
                for one, chosen in pairs
            ]
            # Rates are chosen with one seed.
            break
    return found


def at_the_end(tries: list[Tried]) -> list[str]:
    """The systems whose chosen rates are the lowest or highest that were tried: better ones may lie beyond."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for one in tries:
        groups.setdefault((one.system, one.setting), []).append(one)
    ends = (one for group in groups.values() for one in (group[0], group[-1]) if one.chosen)
    found = [f"{one.system} ({one.setting})" if one.setting else one.system for one in ends]
    return list(dict.fromkeys(found))


def _best(run: Finished, others: list[Finished]) -> bool:
    """Whether a run was chosen among these: its rates may have been given instead."""
    score = run.summary.get(_SCORE)
    return score is not None and all(score >= other.summary[_SCORE] for other in others if other.summary)


def _but_for_rates(run: Finished) -> str:
    """What a run computes, rates left open."""
    options = {name: value for name, value in run.options.items() if name not in _RATES}
    return json.dumps([run.algorithm, run.own, options], sort_keys=True)
