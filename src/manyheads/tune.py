"""Rates chosen on the validation split: the same grid for every algorithm, around what its experiment has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from math import isfinite, log
from pathlib import Path
from statistics import mean

from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.files import disk_errors, make_folder
from manyheads.grid import directory_name, labels, not_to_be_tuned
from manyheads.jobs import Job, News
from manyheads.store import Run
from manyheads.store.layout import EARLIER, EXPERIMENT, TUNING, read_description

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass
class Tuning:
    """One algorithm in one setting, and the runs its rates are chosen by."""

    experiment: Experiment
    """Complete, with the rates that the factors multiply."""
    label: str
    factors: tuple[float, ...]
    seeds: tuple[int, ...]
    folder: Path
    """That of the comparison."""
    failed: set[str] = field(default_factory=set)
    """The labels of jobs that were run and failed, as with rates that are too high."""

    @property
    def jobs(self) -> list[list[Job]]:
        """For each factor a job for each seed, at the place where its run lies now."""
        return [[replace(job, path=self._place(job.path.name)) for job in jobs] for jobs in self._jobs]

    @property
    def tries(self) -> list[Job]:
        """Every factor with the first seed."""
        return [jobs[0] for jobs in self.jobs]

    @property
    def undecided(self) -> list[Job]:
        """The seeds still to be run with the factor that is best so far; none: that factor is chosen.

        Once it has run with all seeds, its mean over them may fall below another factor's score with the first seed.
        Then that one is the best and is run with all seeds too. So luck with the first seed cannot win, and without
        such luck no run is made that the comparison does not need.
        """
        best = self.best
        return [] if best is None else [job for job in self.jobs[best] if not job.finished]

    @property
    def scores(self) -> list[float | None]:
        """Validation accuracy after the last round, factor by factor; None: a run failed.

        The mean over all seeds if all have run, else the first seed's: which others have run so far is chance.
        """
        return [self._score(jobs) for jobs in self.jobs]

    @property
    def best(self) -> int | None:
        """The place of the factor with the highest score, among equals the one nearest to 1; None: all failed."""
        ranked = [
            (score, -abs(log(factor)), place)
            for place, (score, factor) in enumerate(zip(self.scores, self.factors, strict=True))
            if score is not None
        ]
        return max(ranked)[-1] if ranked else None

    @property
    def title(self) -> str:
        """The label as results show it: with the algorithm's title in place of its name."""
        algorithm = self.experiment.algorithm
        return algorithm.title + self.label.removeprefix(algorithm.name)

    @property
    def best_at_edge(self) -> bool:
        """Whether the best factor is the grid's smallest or largest, so that a better one may lie beyond."""
        best = self.best
        return best is not None and self.factors[best] in (min(self.factors), max(self.factors))

    @property
    def chosen(self) -> Experiment:
        """The experiment with the best rates."""
        best = self.best
        assert best is not None
        return self._jobs[best][0].experiment

    def settle(self) -> None:
        """Move every run that differs from the chosen one only in rates and seed to where it belongs.

        Runs with the chosen rates belong in the comparison, all others outside of it, even those that an earlier tuning
        chose: a comparison has one pair of rates. Runs are found wherever they lie and moved one by one, so that the
        next call finishes what a killed process has left undone.
        """
        if self.best is None:
            return
        folder, chosen = self.folder, self.chosen
        earlier = folder / TUNING / EARLIER
        tried = {job.path.name for job in chain(*self._jobs)}
        found: dict[str, list[Path]] = {}
        for place in _places(folder):
            for path in place.glob(f"{self.experiment.algorithm.name}-*"):
                found.setdefault(path.name, []).append(path)
        for name, (path, *others) in found.items():
            if (other := self._but_for_rates(path)) is None:
                continue
            for copy in others:
                # The same run made twice, with rates that had lost before: keep the copy, but out of the way.
                number = next(n for n in count(2) if not (earlier / f"{name}-{n}").exists())
                _move(copy, earlier / f"{name}-{number}")
            best = (other.lr, other.head_lr) == (chosen.lr, chosen.head_lr)
            if best and (other.seed in self.seeds or path.parent == folder):
                _move(path, folder / name)
            else:
                _move(path, (folder / TUNING if name in tried else earlier) / name)

    @cached_property
    def _jobs(self) -> list[list[Job]]:
        """The same jobs, as if all their runs lay in the folder of the tuning."""
        return [[self._job(factor, seed) for seed in self.seeds] for factor in self.factors]

    def _job(self, factor: float, seed: int) -> Job:
        before = self.experiment.recipe
        rates = {"lr": _times(before.lr, factor), "head_lr": _times(before.head_lr, factor)}
        candidate = replace(self.experiment, seed=seed, **rates)
        label = f"{self.label}, rates × {factor:g}"
        if len(self.seeds) > 1:
            label += f", seed {seed}"
        return Job(candidate, self.folder / TUNING / directory_name(candidate), label)

    def _place(self, name: str) -> Path:
        found = (place / name for place in _places(self.folder))
        return next((path for path in found if path.exists()), self.folder / TUNING / name)

    def _score(self, jobs: Sequence[Job]) -> float | None:
        if any(job.label in self.failed for job in jobs) or not jobs[0].finished:
            return None
        return mean(map(_validation, jobs if all(job.finished for job in jobs) else jobs[:1]))

    def _but_for_rates(self, path: Path) -> Experiment | None:
        """The experiment of a run if it differs from this one only in rates and seed; None: it does not."""
        try:
            values = read_description(path / EXPERIMENT)
            other = replace(self.experiment, **{name: values[name] for name in ("lr", "head_lr", "seed")})
        except UserError:
            return None
        # A directory's name contains the run id, a hash of every option.
        return other if directory_name(other) == path.name else None


def tunings(experiments: Sequence[Experiment], factors: Iterable[float], folder: Path) -> list[Tuning]:
    """What has to be tuned before complete experiments can run: each setting once."""
    grid = tuple(sorted({_times(factor, 1.0) for factor in factors}))
    if not (grid[0] > 0 and isfinite(grid[-1])):
        raise UserError(f"--tune {' '.join(f'{f:g}' for f in grid)}: give factors above 0, such as 0.5 1 2.")
    for experiment in experiments:
        if experiment.validation == 0:
            raise UserError("--tune chooses rates on the validation split, but --validation is 0: give a part above 0.")
        if experiment.schedule != "decay":
            raise UserError(f"--tune changes rates that --schedule {experiment.schedule} does not use: leave one out.")
    found = {one.run_id: one for one in _with_one_seed(experiments)}
    if len({replace(one, lr=None, head_lr=None).run_id for one in found.values()}) < len(found):
        raise UserError("--tune tries multiples of the rates, but several are given: give one --lr and one --head-lr.")
    seeds = tuple(dict.fromkeys(experiment.seed for experiment in experiments))
    return [
        Tuning(one, label, grid, seeds, folder)
        for one, label in zip(found.values(), labels(list(found.values())), strict=True)
    ]


def choose(tuned: Sequence[Tuning], run: Callable[[list[Job]], Mapping[str, News]]) -> dict[str, News]:
    """Make the runs that choosing the rates takes, and move them to where they belong.

    ``run`` makes runs and returns the failures by label. Returns the tunings that failed with every rate, by label.
    """
    failed: dict[str, News] = {}
    jobs = [job for tuning in tuned for job in tuning.tries]
    while jobs:
        now = run(jobs)
        for label, news in now.items():
            # Rates that are too high lose; whatever else goes wrong must not decide which rates are best.
            if not news.diverged:
                raise UserError(f"{label}: {news.error}")
        for tuning in tuned:
            tuning.failed.update(now)
        failed |= now
        jobs = [job for tuning in tuned for job in tuning.undecided]
    for tuning in tuned:
        tuning.settle()
    return {
        tuning.label: next(failed[job.label] for job in chain(*tuning.jobs) if job.label in failed)
        for tuning in tuned
        if tuning.best is None
    }


def with_rates(experiments: Sequence[Experiment], tuned: Iterable[Tuning]) -> list[Experiment]:
    """The experiments with their chosen rates, without those that failed with every rate."""
    chosen = {one.experiment.run_id: None if one.best is None else one.chosen for one in tuned}
    pairs = zip(experiments, (chosen[one.run_id] for one in _with_one_seed(experiments)), strict=True)
    return [replace(one, lr=best.lr, head_lr=best.head_lr) for one, best in pairs if best is not None]


def _with_one_seed(experiments: Sequence[Experiment]) -> list[Experiment]:
    return [replace(experiment, seed=experiments[0].seed) for experiment in experiments]


def _places(folder: Path) -> tuple[Path, ...]:
    """Where a run of a comparison may lie."""
    return folder, folder / TUNING, folder / TUNING / EARLIER


def _move(path: Path, target: Path) -> None:
    if path != target:
        make_folder(target.parent)
        with disk_errors(target):
            path.rename(target)


def _times(rate: float, factor: float) -> float:
    """The product to nine digits, without those that are rounding errors."""
    return float(f"{rate * factor:.9g}")


def _validation(job: Job) -> float:
    summary = Run.open(job.path).summary()
    assert summary is not None, "a finished run has a summary"
    if summary["accuracy_validation"] is None:
        raise not_to_be_tuned(job.experiment)
    return summary["accuracy_validation"]
