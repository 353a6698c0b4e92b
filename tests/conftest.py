"""What all tests share: a small experiment that can be opened, stepped and inspected."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from manyheads.algorithms import Algorithm, State
from manyheads.data import Dataset, Federation
from manyheads.engine.phase import Engine, Fit, Phase
from manyheads.experiment import Experiment, Runtime
from manyheads.session import Session, open_session
from manyheads.topology import Mixing, Rows
from manyheads.tree import Buffers, Params

# Tests run in a process for every core: more threads would only wait for each other, which takes three times as long.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Timing is the benchmarks' business: on a busy machine a deadline would only make tests fail at random.
hypothesis.settings.register_profile("manyheads", deadline=None)
hypothesis.settings.load_profile("manyheads")


def blobs(*, workers: int = 4, seed: int = 0, sizes: tuple[int, ...] = (9, 5, 8, 7), classes: int = 3) -> Dataset:
    """Noisy points around one centre per class, [samples, 6]; worker i is user i with its own number of samples."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, 6)) * 2

    def draw(counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        user = torch.arange(workers).repeat_interleave(torch.tensor(counts[:workers]))
        # Every worker has its own favourite class, and some of each.
        y = np.where(rng.random(len(user)) < 0.5, user.numpy() % classes, rng.integers(classes, size=len(user)))
        x = centres[y] + rng.normal(size=(len(user), 6))
        return torch.from_numpy(x).float(), torch.from_numpy(y), user

    train, test = draw(sizes), draw((10,) * workers)
    return Dataset("blobs", train[0], train[1], test[0], test[1], classes, train[2], test[2])


def tiny(algorithm: Algorithm, **changes: object) -> Experiment:
    """Four workers with a handful of points each, in double precision."""
    small: dict[str, object] = {
        "data": blobs(),
        "model": "mlp:5",
        "split": "natural",
        "workers": 4,
        "rounds": 2,
        "validation": 0.0,
        "batch_size": 4,
        "lr": 0.1,
        "head_lr": 0.05,
        "momentum": 0.5,
        "weight_decay": 0.001,
        "clip": 1.0,
        "decay": 0.9,
        "precision": "float64",
    }
    return Experiment(algorithm=algorithm, **{**small, **changes})  # pyright: ignore[reportArgumentType]


CPU = Runtime(device="cpu", threads=1)


def opened(experiment: Experiment, **changes: object) -> Session:
    """The experiment's session on one thread of the CPU, with parts of its context replaced."""
    session = open_session(experiment, CPU)
    return replace(session, ctx=replace(session.ctx, **changes))  # pyright: ignore[reportArgumentType]


def states(session: Session, rounds: int | None = None) -> list[State]:
    """The state before the first round and after each."""
    algorithm, ctx = session.experiment.algorithm, session.ctx
    out = [algorithm.init(ctx)]
    for round in range(ctx.rounds if rounds is None else rounds):
        state = out[-1]
        if algorithm.order == "train-mix":
            state, _ = algorithm.local(state, round, ctx)
            state = algorithm.mix(state, round, ctx)
        else:
            state = algorithm.mix(state, round, ctx)
            state, _ = algorithm.local(state, round, ctx)
        out.append(state)
    return out


def mixing_of(*matrices: Any, directed: bool = False, doubly_stochastic: bool = True) -> Mixing:
    """A mixing with the given P, [N, N] for every round of its period, without any checks."""
    everyone = np.ones(len(matrices[0]), dtype=bool)

    def rows(matrix: np.ndarray) -> Rows:
        entries = (matrix != 0) | np.diag(everyone)
        offsets = np.cumsum([0, *entries.sum(1)])
        return Rows(offsets, np.nonzero(entries)[1], matrix[entries], everyone)

    period = [rows(np.asarray(matrix, dtype=np.float64)) for matrix in matrices]
    return Mixing(
        name="given",
        num_workers=len(everyone),
        period=len(period),
        directed=directed,
        doubly_stochastic=doubly_stochastic,
        notes=(),
        draw=period.__getitem__,
    )


class Recorder:
    """An engine that trains and remembers the rounds and phases that it was asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: list[tuple[int, Phase]] = []

    def fit(self, params: Params, buffers: Buffers, phase: Phase, round: int, *, workers: torch.Tensor | None) -> Fit:
        self.asked.append((round, phase))
        return self.engine.fit(params, buffers, phase, round, workers=workers)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers from torch's generator whether it runs alone or among others."""
    torch.manual_seed(0)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take the most time and have their own tests."""
    monkeypatch.setattr("manyheads.report.page.of_setting", lambda comparison, setting: [])
    monkeypatch.setattr("manyheads.report.page.of_systems", lambda comparison: [])


def held(federation: Federation) -> str:
    """Who holds what in a federation, as text that can be compared."""
    return str({name: leaf.tolist() for name, leaf in federation.indices().items()})


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The helpers above, for tests."""
    return SimpleNamespace(
        blobs=blobs,
        tiny=tiny,
        opened=opened,
        states=states,
        mixing_of=mixing_of,
        Recorder=Recorder,
        held=held,
        cpu=CPU,
    )
