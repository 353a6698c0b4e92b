"""Tables 1 to 4: accuracy by data, heterogeneity, graph and algorithm; of the workers that trained, and of new ones.

Tables 1 and 3 score the 128 workers. Tables 2 and 4 train them on ``dirichlet:0.3`` and score 64 new workers, who take
the learned representation as it is and train heads of their own for ten passes; the table's parameter is that of the
new workers' split. Algorithms with a server stand under ``ring``, as in the paper.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, groupby
from typing import Any

from manyheads.algorithms import title_of
from manyheads.new_workers import NewWorkers
from manyheads.report.collect import Finished
from manyheads.report.numbers import Stat, at_end, shared_seeds
from manyheads.studies.gaps import Gap, Panel, side_by_side
from manyheads.studies.published import REPLACED, Cell, Place, accuracies, data_title
from manyheads.studies.results import Report, Results, beside, in_percent, percent, points
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial, joined

_LEARNED_ON = 0.3
"""The Dirichlet parameter of the workers whose representation new ones take."""

_QUICK_FOR = "cifar10"
"""The data set whose cells are run small."""


def _grid(table: int, size: Size) -> list[Trial]:
    places = list(accuracies(table))
    if table == 3:
        # Local training, for which the paper has no numbers, shows what sharing is worth.
        places += [Place(*row, "ring", "local") for row in dict.fromkeys(place[:2] for place in places)]
    if size.quick:
        places = [place for place in places if place.data == _QUICK_FOR]
    make = _new_workers if table in (2, 4) else _workers
    trials = [make(place, seed, size) for place in places for seed in size.seeds]
    # New workers on the same run come one after another, so that its weights are kept only for that long.
    order = list(dict.fromkeys(trial.source.name for trial in trials))
    return sorted(trials, key=lambda trial: order.index(trial.source.name))


def _workers(place: Place, seed: int, size: Size) -> Trial:
    (data,) = size.data(place.data)
    return size.trial(place.algorithm, data, place.dirichlet, graph=place.graph, seed=seed)


def _new_workers(place: Place, seed: int, size: Size) -> Trial:
    new = NewWorkers(workers=size.new_workers, split=f"dirichlet:{place.dirichlet}")
    return joined(_workers(place._replace(dirichlet=_LEARNED_ON), seed, size), new, dirichlet=place.dirichlet)


def _report(table: int, results: Results, report: Report) -> None:
    paper = accuracies(table)
    asked = [Place(*(trial.place[key] for key in Place._fields)) for trial in results.trials]
    below = "; below it the paper's number and the difference" if paper.keys() & asked else ""
    report.parts.append(
        f"Each cell: accuracy in percent, the mean over workers and then over seeds{below}. "
        "**Bold**: the best of our methods run on that graph, and those level with it to a tenth of a point. *Floor*: "
        "the score of always naming each worker's most frequent class. Methods are compared over the seeds they share."
    )
    if table == 4:
        report.parts.append(
            "With a server, new workers start from the server's model. Ditto's is FedAvg's, so the two differ only by "
            "rounding, which training amplifies."
        )
    runs = {place: results.runs(**place._asdict()) for place in asked}
    ours = {place: at_end(found, "accuracy_mean") for place, found in runs.items()}
    for data in dict.fromkeys(place.data for place in asked):
        report.parts.append(f"## {data_title(data)}")
        title = data_title(data) if table % 2 else f"{data_title(data)}, new workers"
        _add_data(report, title, results, data, runs, paper)
    header = [
        *Place._fields,
        "paper",
        "paper_std",
        "ours",
        "ours_std",
        "seeds",
        "difference",
        "floor",
        "before_mixing",
    ]
    report.add_csv(header, [_numbers(place, ours[place], paper.get(place), results) for place in ours])
    _compare_order(report, {place: found for place, found in runs.items() if found}, paper)


def _add_data(
    report: Report,
    title: str,
    results: Results,
    data: str,
    runs: dict[Place, list[Finished]],
    paper: Mapping[Place, Cell],
) -> None:
    """The numbers on one data set, a line for every graph, and their picture."""
    places = [place for place in runs if place.data == data]
    graphs = list(dict.fromkeys(place.graph for place in places))
    algorithms = list(dict.fromkeys(place.algorithm for place in places))
    several = len(graphs) > 1
    lines: list[list[str]] = []
    panels: list[Panel] = []
    for dirichlet in dict.fromkeys(place.dirichlet for place in places):
        floor, gaps = results.floor(data=data, dirichlet=dirichlet), []
        for graph in graphs:
            here = [Place(data, dirichlet, graph, algorithm) for algorithm in algorithms]
            best = _best(here, runs)
            found = {place: at_end(runs[place], "accuracy_mean") for place in here}
            texts = [_text(stat, paper.get(place), bold=place in best) for place, stat in found.items()]
            lines.append([f"{dirichlet:g}", *([graph] if several else []), percent(floor), *texts])
            for place, stat in found.items():
                name = title_of(place.algorithm)
                gaps.append(_gap(f"{graph}: {name}" if several else name, stat, paper.get(place)))
        panels.append(Panel(f"Dirichlet {dirichlet:g}", in_percent(floor)[0], gaps))
    report.add_table(["Dirichlet", *(["graph"] if several else []), "floor", *map(title_of, algorithms)], lines)
    # Of a single method there is nothing to compare.
    if len({gap.method for panel in panels for gap in panel.gaps if gap.ours is not None}) > 1:
        report.add_picture(side_by_side(data, title, panels, papers_data=REPLACED.get(data, "")))


def _over_shared_seeds(places: Sequence[Place], runs: dict[Place, list[Finished]]) -> dict[Place, float]:
    """Accuracies over the seeds that all these places were run with; empty: there are none."""
    alike = shared_seeds(runs[place] for place in places)
    found = {place: at_end(group, "accuracy_mean") for place, group in zip(places, alike, strict=True)}
    return {place: stat.mean for place, stat in found.items() if stat is not None}


def _best(places: Sequence[Place], runs: dict[Place, list[Finished]]) -> set[Place]:
    """The best method of a line and those level with it, if several were run."""
    rivals = [place for place in places if runs[place]]
    means = _over_shared_seeds(rivals, runs) if len(rivals) > 1 else {}
    return {place for place, mean in means.items() if _lead(max(means.values()), mean) == 0}


def _lead(one: float, other: float) -> float:
    """How far one accuracy is ahead of another, to a tenth of a point: two that differ by less are level."""
    return round(100 * (one - other), 1)


def _text(found: Stat | None, paper: Cell | None, *, bold: bool) -> str:
    """A cell of the page."""
    text = f"**{percent(found)}**" if bold else percent(found)
    if paper is not None:
        text += f"<br>{beside(found, paper.accuracy)}"
    return text


def _gap(method: str, found: Stat | None, paper: Cell | None) -> Gap:
    """A row of the picture."""
    return Gap(method, *in_percent(found), None if paper is None else paper.accuracy)


def _numbers(place: Place, ours: Stat | None, paper: Cell | None, results: Results) -> list[Any]:
    """A line of the CSV file, in percent."""
    theirs = paper or (None, None)
    mean, deviation = in_percent(ours)
    gap = None if mean is None or paper is None else mean - paper.accuracy
    others = [results.stat(metric, **place._asdict()) for metric in ("majority_floor", "accuracy_before_mixing")]
    count = 0 if ours is None else ours.count
    return [*place, *theirs, mean, deviation, count, gap, *(in_percent(stat)[0] for stat in others)]


_AGREES, _LEVEL, _DIFFERS = "as in the paper", "level in either to a tenth of a point", "the other way round"


def _compare_order(report: Report, runs: dict[Place, list[Finished]], paper: Mapping[Place, Cell]) -> None:
    """Which of two methods is ahead: where our answer and the paper's agree, and where not."""
    counts: dict[str, Counter[str]] = {}
    reversed_pairs = []
    both = sorted(runs.keys() & paper.keys())
    for (data, dirichlet, graph), here in groupby(both, key=lambda place: place[:3]):
        for one, other in combinations(here, 2):
            means = _over_shared_seeds((one, other), runs)
            if not means:
                continue
            ahead, behind = sorted((one, other), key=means.__getitem__, reverse=True)
            lead = _lead(means[ahead], means[behind])
            theirs = paper[ahead].accuracy - paper[behind].accuracy
            order = _LEVEL if 0 in (lead, round(theirs, 1)) else _AGREES if theirs > 0 else _DIFFERS
            counts.setdefault(data, Counter())[order] += 1
            if order == _DIFFERS:
                pair = f"{title_of(ahead.algorithm)} over {title_of(behind.algorithm)}"
                reversed_pairs.append([data_title(data), f"{dirichlet:g}", graph, pair, points(lead), points(theirs)])
    if not counts:
        return
    report.parts.append("## Order of the methods\n\nPairs of methods on one graph, by which of the two is ahead:")
    orders = (_AGREES, _LEVEL, _DIFFERS)
    rows = [[data_title(data), *(str(found[order]) for order in orders)] for data, found in counts.items()]
    report.add_table(["data", *orders], rows)
    if reversed_pairs:
        report.parts.append("Pairs the other way round, and how many points the first is ahead of the second:")
        report.add_table(["data", "Dirichlet", "graph", "pair", "ours", "paper"], reversed_pairs)


_TITLES = {
    1: "Table 1: accuracy by data, heterogeneity and graph",
    2: "Table 2: accuracy of new workers, by graph",
    3: "Table 3: accuracy on a ring, all algorithms",
    4: "Table 4: accuracy of new workers on what was learned on a ring, all algorithms",
}

STUDIES = tuple(
    Study(f"table{table}", text, partial(_grid, table), partial(_report, table)) for table, text in _TITLES.items()
)
