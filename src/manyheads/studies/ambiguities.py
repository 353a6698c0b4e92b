"""What the paper leaves open: which reading moves the number on a ring, and by how much.

CIFAR-10 has the readings of the text and of the authors' code. CIFAR-100 and MobiAct, whose workers take four steps in
a pass where those of CIFAR-10 take 25, have those that decide how far a representation moves, and how far what it
learned travels. Some readings are other runs, the rest are other ways to count the same ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads.algorithms import DPSGD, Algorithm, DePRL, DisPFL, Ditto, FedAvg, FedRep, FedRoD, title_of
from manyheads.data.dataset import RAW
from manyheads.report.collect import Finished
from manyheads.report.numbers import majority_floor, shared_seeds, stat
from manyheads.studies.published import Place, accuracies, data_title
from manyheads.studies.records import sizes
from manyheads.studies.results import NOTHING, Report, Results, in_percent, percent, points
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial

_FEW_TEST_SAMPLES = 10
"""Workers with no more are skipped by the authors' code."""

_BASE = "as read"

_Count = Callable[[Finished], float | None]
"""How a run is scored."""

_SPLITS = {"cifar10": (0.1, 0.5), "cifar100": (0.1,), "mobiact": (0.1, 0.5)}
"""The Dirichlet parameters of a data set."""


@dataclass(frozen=True)
class _Reading:
    """Another run."""

    label: str
    algorithms: tuple[Algorithm, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""
    """What follows the split's parameter in its spec."""
    raw: bool = False
    """Whether inputs are taken without the data set's usual standardisation."""


_AS_READ = _Reading(_BASE, (DePRL(), DPSGD(), DisPFL(), FedAvg(), FedRep(), Ditto(), FedRoD()))

_THREE_PASSES = _Reading("the representation trains for three passes", (DePRL(body_epochs=3), FedRep(body_epochs=3)))
"""As many as whole nets train for."""

_THREE_PASSES_AND_GRAPH = _Reading(
    f"{_THREE_PASSES.label} on the random graph", (DePRL(body_epochs=3),), {"graph": "random"}
)
"""Is it the ring that keeps DePRL from gaining as much by three passes as FedRep does,"""

_THREE_PASSES_ALIKE = _Reading(
    f"{_THREE_PASSES.label} and the server weighs workers alike", (FedRep(body_epochs=3, weighting="uniform"),)
)
"""or its equal weights for all workers? On the full graph the two algorithms are then the same."""

_HIGHER_RATE = _Reading("the representation's rate is three times as high", (DePRL(), FedRep()), {"lr": 0.03})
"""In the authors' code the representation's momentum goes on growing while heads train, and moves it three times as far
in the four steps that follow."""

_STEPS = _Reading(
    "single mini-batch steps: two and one", (DePRL(head_steps=2, body_steps=1),), {"momentum": 0.0, "clip": 0.0}
)
"""Algorithm 1 as printed, which knows neither momentum nor clipping."""


def _readings(size: Size, data: str) -> list[_Reading]:
    if data == "mobiact":
        return [_AS_READ, _STEPS, _HIGHER_RATE, _THREE_PASSES, _THREE_PASSES_AND_GRAPH, _THREE_PASSES_ALIKE]
    if data == "cifar100":
        return [
            _AS_READ,
            _HIGHER_RATE,
            _THREE_PASSES,
            _THREE_PASSES_AND_GRAPH,
            _THREE_PASSES_ALIKE,
            # Heads are scored on the features of eval mode.
            _Reading("heads train in eval mode", (DePRL(frozen="eval"), FedRep(frozen="eval"))),
            _Reading("rates do not fall", (DePRL(),), {"decay": 1.0}),
            _Reading("statistics of BatchNorm are not mixed", (DePRL(),), {"norm": "local"}),
            _Reading("batches of 16", (DePRL(), FedRep()), {"batch_size": 16}),
        ]
    # Where the small net's classifier begins makes no difference: it has one linear layer before its head.
    classifier = "relu1" if size.quick else "fc9"
    return [
        _AS_READ,
        _STEPS,
        _Reading("the head is the whole classifier", (DePRL(),), {"head": classifier}),
        # All workers start alike, so a round then ends with the very models that are otherwise scored before mixing.
        # One run is enough: it shows how far two runs with the same numbers lie apart on a GPU.
        _Reading("mix before training", (DePRL(order="mix-train"),)),
        _Reading("the mean model is scored", (DPSGD(evaluate="mean-model"),)),
        _Reading("the server weighs workers alike", (FedAvg(weighting="uniform"), FedRep(weighting="uniform"))),
        _Reading("no cap on a worker's samples", (DePRL(), DPSGD()), suffix=":uncapped"),
        _Reading("pixels as fractions of 255", (DePRL(), DPSGD()), raw=not size.quick),
        _THREE_PASSES,
    ]


def _accuracy(run: Finished) -> float | None:
    return run.summary["accuracy_mean"]


def _accuracy_before_mixing(run: Finished) -> float | None:
    return run.summary["accuracy_before_mixing"]


def _best_round(run: Finished) -> float | None:
    return max((row["accuracy_mean"] for row in run.metrics), default=None)


def _enough_test_samples(run: Finished) -> float | None:
    kept = [score for score, count in _scores(run) if count > _FEW_TEST_SAMPLES]
    return float(np.mean(kept)) if kept else None


def _by_samples(run: Finished) -> float | None:
    scores, counts = zip(*_scores(run), strict=True)
    return float(np.average(scores, weights=counts))


_COUNTS: dict[str, _Count] = {
    "scored before mixing": _accuracy_before_mixing,
    "best evaluated round, not the last": _best_round,
    f"without workers of at most {_FEW_TEST_SAMPLES} test samples": _enough_test_samples,
    "mean weighted by test samples": _by_samples,
}
"""Other ways to count a run."""


def _grid(size: Size) -> list[Trial]:
    return [
        size.trial(
            algorithm, f"{data}{RAW if reading.raw else ''}", f"{dirichlet:g}{reading.suffix}", seed=seed,
            place={"data": data, "dirichlet": dirichlet, "reading": reading.label}, **reading.changes,
        )
        for data in size.data(*_SPLITS)
        for reading in _readings(size, data)
        for dirichlet in _SPLITS.get(data, (0.1, 0.5))
        for algorithm in reading.algorithms
        for seed in size.seeds
    ]  # fmt: skip


def _report(results: Results, report: Report) -> None:
    report.parts.append(
        "Accuracy in percent, and by how much each reading moves it from *as read*, the reading used everywhere "
        "else; the paper's number for comparison. Readings are compared over the seeds they share; readings without "
        "a line were not run. *Floor*: the score of always naming each worker's most frequent class in that "
        "reading's runs. *Mix before training* ends a round with the same models that *scored before mixing* "
        "evaluates; the two differ only by rounding on the GPU."
    )
    paper = {place: cell.accuracy for place, cell in {**accuracies(1), **accuracies(3)}.items()}
    numbers = []
    for data, dirichlet in dict.fromkeys((t.place["data"], t.place["dirichlet"]) for t in results.trials):
        here = {"data": data, "dirichlet": dirichlet}
        rows = []
        for reading, algorithm, graph, count in _outcomes(results, here):
            base = results.runs(**here, reading=_BASE, algorithm=algorithm)
            runs = base if reading in _COUNTS else results.runs(**here, reading=reading, algorithm=algorithm)
            found = stat(map(count, runs))
            if found is None:
                continue
            theirs = paper.get(Place(data, dirichlet, graph, algorithm))
            moved = None if reading == _BASE else _moved(runs, count, base)
            short = NOTHING if theirs is None else points(100 * found.mean - theirs)
            # Which floor other workers or other weights would have is not recorded.
            counted_alike = reading not in _COUNTS or count in (_accuracy_before_mixing, _best_round)
            floor = majority_floor(runs) if counted_alike else None
            rows.append(
                [reading, title_of(algorithm), percent(floor), percent(found),
                 NOTHING if moved is None else points(moved), NOTHING if theirs is None else f"{theirs:.1f}", short]
            )  # fmt: skip
            numbers.append(
                [data, dirichlet, reading, algorithm, in_percent(floor)[0], 100 * found.mean, moved, theirs]
            )  # fmt: skip
        report.parts.append(f"## {data_title(data)}, Dirichlet {dirichlet:g}")
        report.add_table(["reading", "algorithm", "floor", "ours", "moved by", "paper", "from the paper's"], rows)
    report.add_csv(["data", "dirichlet", "reading", "algorithm", "floor", "ours", "moved", "paper"], numbers)


def _outcomes(results: Results, here: Mapping[str, Any]) -> list[tuple[str, str, str, _Count]]:
    """Every reading of every algorithm at a place, its graph, and how its runs are counted."""
    asked = dict.fromkeys(
        (trial.place["reading"], trial.place["algorithm"], trial.place["graph"])
        for trial in results.trials
        if here.items() <= trial.place.items()
    )
    counted = [
        (label, algorithm, graph, count)
        for label, count in _COUNTS.items()
        for reading, algorithm, graph in asked
        if reading == _BASE
    ]
    return [*((*reading, _accuracy) for reading in asked), *counted]


def _moved(runs: Sequence[Finished], count: _Count, base: Sequence[Finished]) -> float | None:
    """How far a reading moves the number, in points, over the seeds that both have; None: they share none."""
    ours, theirs = shared_seeds([runs, base])
    after, before = stat(map(count, ours)), stat(map(_accuracy, theirs))
    return None if after is None or before is None else 100 * (after.mean - before.mean)


def _scores(run: Finished) -> Sequence[tuple[float, int]]:
    """Accuracy and number of test samples of every worker that has any."""
    accuracy = run.workers["accuracy"]
    return [(score, count) for score, count in zip(accuracy, sizes(run)["test"], strict=True) if score is not None]


STUDIES = (Study("ambiguities", "Readings of the paper that could explain a gap", _grid, _report),)
