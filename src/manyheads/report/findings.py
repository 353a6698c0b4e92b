"""The report in sentences: what was compared, and what came out."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from manyheads.algorithms import attribute_of
from manyheads.algorithms.base import epochs_by_steps
from manyheads.algorithms.join import Join
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison, System
from manyheads.report.naming import shown, words
from manyheads.report.numbers import Stat, at_end, best_system, best_systems, difference, majority_floor, number
from manyheads.units import counted, no_finer, plural, plus_minus

_MOST_NAMED = 3
"""Systems that the title names one by one."""

_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a chance of one in twenty, with 2 to 10 seeds; more seeds are treated as ten."""

_SCORED_OTHERWISE = {
    ("order", "mix-train"): "Scored as local training leaves them, not after mixing",
    ("evaluate", "mean-model"): "Scored with the mean of all models, not with each worker's own",
}
"""Options under which scores are not those of each worker's model after mixing."""

_TRAIN_MORE = "train longer, or with other rates"
"""What to do about a system that is no better than the majority floor."""

_WITHOUT_GRAPH = {"none": "no graph", "server": "a server"}
_CONDITIONS: dict[str, Callable[[Any], str]] = {
    "workers": lambda count: counted(count, "worker"),
    "graph": lambda graph: _WITHOUT_GRAPH.get(graph, f"graph {shown(graph)}"),
    "split": lambda split: f"split {shown(split)}",
    "rounds": lambda count: counted(count, "round"),
}


def title(comparison: Comparison) -> str:
    """Who, on which data."""
    names = [system.label for system in comparison.systems]
    who = _listed(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} others"
    return f"{who} on {shown(comparison.shared['data'])}" if "data" in comparison.shared else who


def conditions(comparison: Comparison) -> str:
    """What the systems share, their names if the title has no room for them, and the grid."""
    names, shared, seeds = [system.label for system in comparison.systems], comparison.shared, comparison.seeds
    parts = [say(shared[name]) for name, say in _CONDITIONS.items() if name in shared]
    if shared.get("relabel"):
        parts.append("every worker naming the classes in its own order")
    parts.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({', '.join(map(str, seeds))})")
    said = f"{', '.join(parts)}."
    if len(names) > _MOST_NAMED:
        said = f"{_listed(names)}: {said}"
    for place, name in enumerate(comparison.grid):
        values = dict.fromkeys(shown(setting.values[name]) for setting in comparison.settings)
        said += f" {'Each' if place == 0 else 'And each'} with {words(name)} {_listed(list(values))}."
    return said


def caveats(comparison: Comparison) -> list[str]:
    """What makes the systems' scores less comparable than they look: when, with what and after how much work."""
    said = []
    for (option, value), text in _SCORED_OTHERWISE.items():
        if names := [system.label for system in comparison.systems if _option(system, option) == value]:
            said.append(f"{text} ({option} {value}): {_listed(names)}.")
    works: dict[str, list[str]] = {}
    for system in comparison.systems:
        if work := _local_work(system):
            works.setdefault(work, []).append(system.label)
    if len(works) > 1:
        said.append(f"Local work in a round: {'; '.join(f'{work} ({_listed(who)})' for work, who in works.items())}.")
    return said


def verdict(comparison: Comparison) -> str:
    """What came out: for a single setting in full, for a grid how often each system is ahead."""
    settings = range(len(comparison.settings))
    if len(settings) == 1:
        return outcome(comparison, 0)
    every = {j: found for j in settings if (found := best_systems(comparison, j))}
    if len(comparison.systems) == 1 or not every:
        return ""
    best = {j: found[0] for j, found in every.items()}
    ahead = Counter(comparison.systems[found[0]].label for found in every.values() if len(found) == 1)
    wins = [f"{label} in {count}" for label, count in ahead.most_common()]
    if level := len(every) - ahead.total():
        wins.append(f"several level in {level}")
    leads = [lead for j, i in best.items() if (lead := _lead(comparison, j, i)) is not None]
    tested = [lead.beyond_chance for lead in leads if lead.beyond_chance is not None]
    noise = f", in {sum(tested)} by more than noise" if tested else " (one seed: no error is known)"
    said = f"Ahead in {comparison.score_name}: {_listed(wins)} of {len(settings)} settings{noise}."
    if low := sum(_beats_nothing(comparison, j, i) for j, i in best.items()):
        said += f" In {low} no system does better than naming each worker's most frequent class: {_TRAIN_MORE}."
    return said


def outcome(comparison: Comparison, setting: int) -> str:
    """Who is ahead in a setting, by how much, and whether that is more than noise."""
    best = best_system(comparison, setting)
    found = None if best is None else at_end(comparison.cells[best, setting], "accuracy_mean")
    if best is None or found is None:
        scored = at_end(comparison.at(setting), "accuracy_mean") is not None
        return "The systems share too few seeds: none is named the best." if scored else ""
    unit = " %" if comparison.is_accuracy else ""
    system, reached = comparison.systems[best], plus_minus(found.mean, found.deviation or None, comparison.score)
    said = f"{system.label} {'reach' if system.algorithm == Join.name else 'reaches'} {reached}{unit}"
    if any(map(_left_out, comparison.cells[best, setting])):
        said += _over(comparison.cells[best, setting])
    said += f"{_ahead(comparison, setting, best)}."
    floor = majority_floor(comparison.at(setting))
    if floor is not None:
        said += f" Naming each worker's most frequent class would score {comparison.score(floor.mean)}{unit}"
        said += f", and no system scores more: {_TRAIN_MORE}." if _beats_nothing(comparison, setting, best) else "."
    return said


def _beats_nothing(comparison: Comparison, setting: int, system: int) -> bool:
    """Whether a system scores no more than naming each worker's most frequent class would."""
    found = at_end(comparison.cells[system, setting], "accuracy_mean")
    floor = majority_floor(comparison.cells[system, setting])
    return found is not None and floor is not None and found.mean <= floor.mean


class _Lead(NamedTuple):
    """How far the best of a setting is ahead of the next."""

    second: int
    gap: Stat
    """Seed by seed."""

    @property
    def beyond_chance(self) -> bool | None:
        """Whether it is more than noise; None: unknown, with only one seed."""
        if self.gap.error is None:
            return None
        return self.gap.mean > _STUDENT_T[min(self.gap.count, len(_STUDENT_T) + 1) - 2] * self.gap.error


def _lead(comparison: Comparison, setting: int, best: int) -> _Lead | None:
    """How far the best system is ahead of the next; None: there is no other."""
    leads = [_Lead(i, gap) for i, gap in _gaps(comparison, setting, best).items()]
    return min(leads, key=lambda lead: lead.gap.mean, default=None)


def _gaps(comparison: Comparison, setting: int, best: int) -> dict[int, Stat]:
    """How far the best system is ahead of each other one."""
    gaps = {i: difference(comparison, setting, best, i) for i in range(len(comparison.systems)) if i != best}
    return {i: gap for i, gap in gaps.items() if gap is not None}


def _ahead(comparison: Comparison, setting: int, best: int) -> str:
    """The lead in words, with its standard error over seeds."""
    lead = _lead(comparison, setting, best)
    if lead is None:
        return ""
    second, gap = lead
    if gap.mean == 0:
        level = [comparison.systems[i].label for i, gap in _gaps(comparison, setting, best).items() if gap.mean == 0]
        return f", level with {_listed(level)}"
    mean = comparison.score(gap.mean)
    error = "" if gap.error is None else f" (standard error {no_finer(comparison.score(gap.error), mean)})"
    fewer = any(gap.count < len(comparison.cells[i, setting]) for i in (best, second))
    shared = " that both have" if fewer else ""
    noise = {
        None: f" (one seed{shared}: no error is known)",
        True: f" over the {gap.count} seeds{shared}" if fewer else "",
        False: f", which {gap.count} seeds{shared} cannot tell from noise",
    }[lead.beyond_chance]
    margin = f"{mean}{' points' if comparison.is_accuracy else ''}{error}"
    ours, theirs = (_over(comparison.cells[i, setting]) for i in (best, second))
    return f", {margin} ahead of {comparison.systems[second].label}{theirs if theirs != ours else ''}{noise}"


def _option(system: System, name: str) -> Any:
    """A system's option, or the fact that its algorithm has in the option's place; None: it is not known."""
    return system.own[name] if name in system.own else attribute_of(system.algorithm, system.own, name)


def _local_work(system: System) -> str:
    """What a worker trains in a round, in words; empty: no options tell."""
    passes = batches = 0
    for steps, epochs in epochs_by_steps(system.own).items():
        given = number(system.own[steps])
        batches += given or 0
        passes += 0 if given is not None else number(system.own[epochs]) or 0
    counts = [f"{passes:g} {plural('pass', passes)}"] if passes else []
    counts += [f"{batches:g} {plural('mini-batch', batches)}"] if batches else []
    if not counts:
        return ""
    models, share = _option(system, "num_models") or 1, number(system.own.get("participation"))
    each = f" for each of {models} models" if models > 1 else ""
    part = f", by {100 * share:g} % of the workers" if share is not None and share < 1 else ""
    return " and ".join(counts) + each + part


def _over(runs: Sequence[Finished]) -> str:
    """How many workers the scores of some seeds are means over."""
    workers = runs[0].options["workers"]
    counts = sorted({workers - _left_out(run) for run in runs})
    return f" over {' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} of {counted(workers, 'worker')}"


def _left_out(run: Finished) -> int:
    """How many workers a run's scores leave out: those without test samples, or away."""
    return run.summary["workers_without_test"]


def _listed(names: Sequence[str]) -> str:
    if any("," in name for name in names):
        # Labels with several options contain commas themselves.
        return "; ".join(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
