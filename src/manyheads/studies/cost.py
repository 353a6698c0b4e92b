"""What trials will take before they run: by the records of similar runs if there are any, else estimated."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from manyheads.algorithms.base import FORWARD
from manyheads.data import Dataset
from manyheads.data.dataset import RAW
from manyheads.errors import UserError
from manyheads.machine import cores
from manyheads.recipes import step_seconds
from manyheads.store import Run
from manyheads.store.layout import SUMMARY
from manyheads.studies.trial import Trial


class Pools(NamedTuple):
    """How large a data set is."""

    train: int
    """Samples."""
    test: int
    numbers: int
    """Of a sample."""


POOLS = {
    "digits": Pools(1_438, 359, 64),
    "cifar10": Pools(50_000, 10_000, 3_072),
    "cifar100": Pools(50_000, 10_000, 3_072),
    "fashion-mnist": Pools(60_000, 10_000, 1_024),
    "mobiact": Pools(8_393, 2_702, 900),
}

PARAMETERS = {"mlp:64": 4_810, "dnn": 634_182, "vgg11": 7_538_698, "resnet18": 11_220_132, "alexnet": 23_271_114}
"""Weights of the nets, with the outputs that the studies' data need."""

GPU_SECONDS_PER_SAMPLE = {"mlp": 5e-7, "dnn": 5e-7, "vgg11": 1.1e-5, "resnet18": 1.9e-5, "alexnet": 1.2e-5}
"""One sample of a training pass on an H200, 128 workers side by side: the first three in tf32, the others in bf16
(benchmarks/records/gpu.json)."""

_GPU_START_SECONDS = 20.0
"""Until a run's kernels are compiled and its steps recorded."""

_COPIES = 4
"""Of all workers' weights: as a round began, as it leaves them, on the way, momentum."""

_MEGABYTES_OF_PROGRAM = 500


@dataclass(frozen=True)
class Estimate:
    """What a trial takes."""

    seconds: float
    bytes: float
    measured: bool
    """Whether the time comes from the records of similar runs."""


class Costs:
    """Estimates for a kind of device, from the records in a folder."""

    def __init__(self, records: Path, device: str) -> None:
        self.on_gpu = device != "cpu"
        self._paces = _paces(records, self.on_gpu)

    def __call__(self, trial: Trial, *, trained: bool = False) -> Estimate:
        """A trial's time and memory; ``trained``: the run that its new workers build on exists already."""
        paces = self._paces.get(kind(trial), [])
        seconds = 0.0
        if not trained:
            passes = trial.source.rounds * _work(trial.source)
            seconds += passes * median(paces) if paces else self._passes(trial, passes)
        if trial.new is not None:
            seconds += self._passes(trial, trial.new.head_epochs * FORWARD)
        if self.on_gpu:
            seconds += _GPU_START_SECONDS
        return Estimate(seconds, _bytes(trial), bool(paces))

    def _passes(self, trial: Trial, passes: float) -> float:
        """Seconds that passes over all train samples take."""
        train = _pools(trial).train
        model, batch = str(trial.experiment.model), trial.experiment.batch_size or 1
        if self.on_gpu:
            return train * passes * GPU_SECONDS_PER_SAMPLE.get(model.partition(":")[0], 1e-6)
        return train * passes * step_seconds(model, batch) / batch / cores()

    def of_all(self, trials: Iterable[Trial]) -> list[Estimate]:
        """Estimates of trials made one after another: a run counts once, even if several trials build on it."""
        made: set[str] = set()
        estimates = []
        for trial in trials:
            estimates.append(self(trial, trained=trial.new is not None and trial.source.name in made))
            made.add(trial.source.name)
        return estimates


def total(estimates: Sequence[Estimate]) -> Estimate:
    """All of them one after another."""
    return Estimate(
        sum(one.seconds for one in estimates),
        max((one.bytes for one in estimates), default=0.0),
        all(one.measured for one in estimates),
    )


def _work(trial: Trial) -> float:
    """A round's work in passes over all train samples, evaluation included."""
    train, test, _ = _pools(trial)
    scored = FORWARD * (2 * test + train) / train + 2 * trial.theory
    return _passes_a_round(trial) + scored / trial.every


def _passes_a_round(trial: Trial) -> float:
    """Training passes over all samples in a round; a pass over frozen features counts as its forward part."""
    options = vars(trial.experiment.algorithm)
    # A step is one batch of every worker, however many samples it holds.
    step = trial.experiment.workers * (trial.experiment.batch_size or 1) / _pools(trial).train

    def passes(unit: str) -> float:
        steps = options.get(f"{unit}steps")
        return options.get(f"{unit}epochs", 0) if steps is None else steps * step

    whole = trial.experiment.algorithm.num_models * passes("")
    return FORWARD * passes("head_") + passes("body_") + whole


def _bytes(trial: Trial) -> float:
    train, test, numbers = _pools(trial)
    experiment = trial.experiment
    weights = PARAMETERS.get(str(experiment.model), 0) * experiment.workers * 4
    return (
        weights * (_COPIES + experiment.algorithm.extra_rows)
        + (train + test) * numbers * 4
        + _MEGABYTES_OF_PROGRAM * 1e6
    )


def _pools(trial: Trial) -> Pools:
    data = trial.experiment.data
    if isinstance(data, Dataset):
        return Pools(len(data.x_train), len(data.x_test), prod(data.input_shape))
    return POOLS[data.removesuffix(RAW)]


Kind = tuple[str, str, str, int]
"""What similar runs have in common: data, net, algorithm and number of workers."""


def kind(trial: Trial) -> Kind:
    """What a trial's run has in common with similar ones; of new workers, the run they build on."""
    return trial.data, str(trial.experiment.model), trial.experiment.algorithm.name, trial.experiment.workers


def _paces(records: Path, on_gpu: bool) -> dict[Kind, list[float]]:
    """Seconds that a pass over all train samples took, by kind of run, in the records made on such a device."""
    found: dict[Kind, list[float]] = {}
    for trial, summary in _recorded(records):
        if (summary.get("runtime", {}).get("device", "cpu") != "cpu") == on_gpu:
            found.setdefault(kind(trial), []).append(summary["seconds"] / summary["rounds"] / _work(trial))
    return found


def _recorded(records: Path) -> Iterable[tuple[Trial, dict[str, Any]]]:
    """The recorded runs on known data sets, and their summaries."""
    for summary in sorted(records.glob(f"*/{SUMMARY}")):
        with suppress(UserError):
            run = Run.open(summary.parent)
            experiment, end = run.experiment, run.summary()
            if end is not None and end.get("evaluated_rounds") and str(experiment.data).removesuffix(RAW) in POOLS:
                every = max(1, round(end["rounds"] / end["evaluated_rounds"]))
                yield Trial(experiment, {}, every=every, theory=end.get("theory_m") is not None), end
