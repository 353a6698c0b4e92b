"""The rates that were tried before a comparison, and what each scored on the held-out samples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

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
    seeds: int
    """With how many seeds they were begun: the chosen rates with all, others at least with the first."""
    score: float | None
    """Validation accuracy after the last round, mean over these seeds; None: a run failed or did not finish."""
    chosen: bool


def tried(comparison: Comparison) -> list[Tried]:
    """Every pair that the last tuning tried, system by system and the lowest rates first; nothing without one."""
    others: dict[str, list[Finished]] = {}
    for run in rejected(comparison.folder):
        # Folders further down hold the runs of earlier tunings, with other factors or another seed.
        unscored = run.summary and run.summary.get(_SCORE) is None
        if run.path.parent == comparison.folder / TUNING and not unscored:
            others.setdefault(_setting(run), []).append(run)
    found = []
    for (i, j), runs in sorted(comparison.cells.items()):
        # A system that ignores the grid's options has the same runs in every setting: list them once.
        beside = others.pop(_setting(runs[0]), [])
        pairs: dict[tuple[float, float], list[Finished]] = {}
        for run in (*runs, *beside):
            pairs.setdefault((run.options["lr"], run.options["head_lr"]), []).append(run)
        if not beside or not all(_no_worse(runs, of_pair) for of_pair in pairs.values()):
            # Nothing was tuned, or the rates were given by hand instead of those that had won.
            continue
        label, setting = comparison.systems[i].label, str(comparison.settings[j])
        found += [
            Tried(label, setting, *rates, len(of_pair), _mean_score(of_pair), of_pair[0] in runs)
            for rates, of_pair in sorted(pairs.items())
        ]
    return found


def chosen_at_edge(tries: list[Tried]) -> list[str]:
    """The systems whose chosen rates are the lowest or highest that were tried: better ones may lie beyond."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for one in tries:
        groups.setdefault((one.system, one.setting), []).append(one)
    ends = (one for group in groups.values() for one in (group[0], group[-1]) if one.chosen)
    found = [f"{one.system} ({one.setting})" if one.setting else one.system for one in ends]
    return list(dict.fromkeys(found))


def _no_worse(chosen: Sequence[Finished], others: Sequence[Finished]) -> bool:
    """Whether the chosen rates score no lower: over all seeds of each, or over the seeds that both were run with."""
    seeds = {run.seed for run in chosen} & {run.seed for run in others}
    both = [[run for run in side if run.seed in seeds] for side in (chosen, others)]
    pairs = ((_mean_score(ours), _mean_score(theirs)) for ours, theirs in ((chosen, others), both) if theirs)
    return any(theirs is None or (ours is not None and ours >= theirs) for ours, theirs in pairs)


def _mean_score(runs: Sequence[Finished]) -> float | None:
    """The mean validation accuracy; None: a run failed or did not finish."""
    scores = [score for run in runs if (score := run.summary.get(_SCORE)) is not None]
    return mean(scores) if len(scores) == len(runs) else None


def _setting(run: Finished) -> str:
    """What a run computes, rates and seed left open."""
    options = {name: value for name, value in run.options.items() if name not in (*_RATES, "seed")}
    return json.dumps([run.algorithm, run.own, options], sort_keys=True)
