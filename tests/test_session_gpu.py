"""Whole runs on a GPU: rows in host memory against rows on the device, and bits that repeat."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyheads.algorithms import REGISTRY
from manyheads.engine import choose
from manyheads.engine.cuda_graphs.memory_plan import free_memory
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import run
from manyheads.session import open_session
from manyheads.store import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

_TRAIN = """
import sys
from pathlib import Path
from manyheads.algorithms import DePRL
from manyheads.experiment import Experiment, Runtime
from manyheads.rounds import train
model, precision, engine, rounds, out = sys.argv[1:]
experiment = Experiment(algorithm=DePRL(), model=model, workers=6, rounds=int(rounds), precision=precision)
runtime = Runtime(device="cuda", engine=engine, deterministic=True, out=Path(out), checkpoint_every=1)
list(train(experiment, runtime))
"""


_CALM = {"lr": 0.02, "head_lr": 0.02, "precision": "float64"}
"""With the ten times higher rates of the digits' recipe, one rounding grows to 1e-7 and more in two rounds of a CNN."""


def test_a_module_may_come_on_the_gpu() -> None:
    """And stays there, as it is."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).cuda()
    experiment = Experiment(algorithm=REGISTRY["local"](), model=net, workers=2, rounds=1)
    (step,) = run(open_session(experiment, Runtime(device="cuda")))
    assert step.record is not None and step.record.accuracy_mean > 0.2
    assert net[1].weight.is_cuda


class _Images(torch.nn.Module):
    """A net as its users write them: layers by name, and a forward that applies them one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))


def test_a_straight_net_learns_what_the_loop_does(tmp_path: Path) -> None:
    models = {}
    for engine in ("auto", "loop"):
        experiment = Experiment(algorithm=REGISTRY["deprl"](), model=_Images, workers=6, rounds=2, **_CALM)
        session = open_session(experiment, Runtime(device="cuda", engine=engine, out=tmp_path / engine))
        list(run(session))
        models[engine] = load_file(tmp_path / engine / "models.safetensors")
    assert Run.open(tmp_path / "auto").summary()["runtime"]["engine"] == "cuda-graphs"
    for name, leaf in models["loop"].items():
        torch.testing.assert_close(models["auto"][name], leaf, rtol=1e-9, atol=1e-9)


def test_a_limit_of_this_process_counts() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.mem_get_info(device)[1]
    try:
        torch.cuda.set_per_process_memory_fraction(0.1, device)
        assert free_memory(device) <= 0.1 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize("name", REGISTRY)
def test_rows_in_host_memory_are_rows_like_any_other(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every algorithm with its metrics, checkpoints and a continued run; only mixing sums in another order."""
    monkeypatch.setenv("MANYHEADS_COMPILE", "0")
    ends = {}
    for place in ("device", "host"):
        if place == "host":
            monkeypatch.setattr(choose, "settle", lambda plan, *_: replace(plan, rows_on_host=True))
        # A run whose algorithm looks at the number of rounds cannot be given more of them.
        for rounds in (2,) if REGISTRY[name].uses_rounds else (1, 2):
            experiment = Experiment(algorithm=REGISTRY[name](), model="cnn", workers=6, rounds=rounds, **_CALM)
            session = open_session(experiment, Runtime(device="cuda", out=tmp_path / place, theory_every=0))
            assert next(iter(session.ctx.initial.params.values())).is_cuda == (place == "device")
            list(run(session))
        ends[place] = (Run.open(tmp_path / place).metrics()[-1], load_file(tmp_path / place / "models.safetensors"))
    (on_device, models), (on_host, same) = ends["device"], ends["host"]
    for name, leaf in models.items():
        torch.testing.assert_close(same[name], leaf, rtol=1e-9, atol=1e-9)
    for number in ("loss", "consensus_error", "accuracy_mean", "train_loss"):
        assert on_host[number] == pytest.approx(on_device[number], rel=1e-7, nan_ok=True), number


@pytest.mark.parametrize(
    ("model", "precision", "engine"),
    [("mlp", "tf32", "auto"), ("cnn", "tf32", "auto"), ("resnet18", "bf16", "auto"), ("cnn", "float32", "loop")],
)
def test_bits_repeat(model: str, precision: str, engine: str, tmp_path: Path) -> None:
    """Four rounds twice, and two rounds continued to four, each in a process of its own."""

    def start(out: str, rounds: int) -> subprocess.Popen:
        words = [sys.executable, "-c", _TRAIN, model, precision, engine, str(rounds), str(tmp_path / out)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def end(process: subprocess.Popen) -> None:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors.decode()[-2000:]

    for process in [start("whole", 4), start("again", 4), start("continued", 2)]:
        end(process)
    end(start("continued", 4))
    whole = (tmp_path / "whole" / "models.safetensors").read_bytes()
    for out in ("again", "continued"):
        assert (tmp_path / out / "models.safetensors").read_bytes() == whole, out
