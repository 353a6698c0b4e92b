"""``export``: a file that holds one worker's net and says how to use it."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from manyheads import Experiment, Runtime, from_arrays, train
from manyheads.cli import main
from manyheads.store import Run


def _use(run: Path, worker: int, out: Path) -> dict[str, Any]:
    """Export a net, do what the file says, and compare the net with the run's; gives what the file says."""
    assert main(["export", str(run), "--worker", str(worker), "--out", str(out)]) == 0
    with safetensors.safe_open(out, "pt") as file:
        about = json.loads(file.metadata()["manyheads"])
    wanted = Run.open(run).model(worker)
    x = torch.rand(5, *about["input_shape"], dtype=next(wanted.parameters()).dtype)
    torch.save(x, out.with_name("x"))
    # In a process that has imported nothing, as in a reader's.
    use = f"import torch\ntorch.save(net(torch.load({str(out.with_name('x'))!r})), {str(out.with_name('y'))!r})"
    program = f"path = {str(out)!r}\n{about['load']}\n{use}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=out.parent)
    assert torch.equal(torch.load(out.with_name("y")), wanted(x))
    return about


def test_the_file_explains_itself(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    about = _use(finished, 2, tmp_path / "model.safetensors")
    assert capsys.readouterr().out == f"{tmp_path / 'model.safetensors'}\n"
    assert (about["worker"], about["algorithm"], about["data"]) == (2, "deprl", "digits")
    assert about["num_classes"] == 10
    assert about["pixels"] == {"scale": 16, "mean": [0.0], "std": [1.0]}


@pytest.mark.parametrize(
    ("words", "layer"),
    [((), "classifier"), (("--head", "classifier.2"), "classifier.2"), (("--head", "all"), "all")],
)
def test_plain_torch_loads_the_file(
    words: tuple[str, ...], layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "from torch import nn",
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Dropout(0.1))",
        "        self.classifier = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10))",
        "    def forward(self, x):",
        "        return self.classifier(self.body(x))",
    ]
    (tmp_path / "plain_net.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("plain_net", None)
    run, out = tmp_path / "run", tmp_path / "model.safetensors"
    options = ["--workers", "3", "--rounds", "1", "--model", "plain_net:Net", *words, "--quiet"]
    assert main(["train", "deprl", *options, "--out", str(run)]) == 0
    assert _use(run, 1, out)["head"] == layer
    net = importlib.import_module("plain_net").Net()
    net.load_state_dict(load_file(out))
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(net.eval()(x), Run.open(run).model(1)(x))


def test_two_heads_in_double_precision(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--workers", "3", "--rounds", "1", "--model", "mlp:8", "--precision", "float64", "--quiet"]
    assert main(["train", "fedrod", *words, "--out", str(run)]) == 0
    assert len(_use(run, 0, tmp_path / "model.safetensors")["heads"]) == 2


def test_arrays_and_a_loss_that_only_python_can_give_are_not_needed(tmp_path: Path) -> None:
    def squared(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - y).square()

    data = from_arrays(torch.rand(60, 4), torch.rand(60))
    experiment = Experiment(data=data, loss=squared, split="iid", workers=2, rounds=1)
    (record,) = train(experiment, Runtime(out=tmp_path / "run", device="cpu"))
    about = _use(tmp_path / "run", 1, tmp_path / "model.safetensors")
    assert about["data"]["kind"] == "arrays" and about["run_id"] == record.run_id


def test_layers_that_were_not_trained_are_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from torch import nn",
        "def half():",
        "    first = nn.Linear(64, 6).requires_grad_(False)",
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 10))",
    ]
    (tmp_path / "half_trained.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--workers", "3", "--rounds", "1", "--model", "half_trained:half", "--quiet"]
    assert main(["train", "deprl", *words, "--out", str(tmp_path / "run")]) == 0
    _use(tmp_path / "run", 1, tmp_path / "model.safetensors")


def test_a_damaged_file_of_weights_is_written_anew_as_the_message_says(
    tmp_path: Path, capsys: pytest.CaptureFixture, finished: Path
) -> None:
    run, words = tmp_path / "run", ["--worker", "1", "--out", str(tmp_path / "model.safetensors")]
    shutil.copytree(finished, run)
    whole = (run / "models.safetensors").read_bytes()
    (run / "models.safetensors").write_bytes(whole[:-1])
    assert main(["export", str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("put it back, or delete summary.json and continue the run, which writes it again.")
    (run / "summary.json").unlink()
    assert main(["train", "--from", str(run / "experiment.json"), "--out", str(run), "--quiet"]) == 0
    assert (run / "models.safetensors").read_bytes() == whole
    assert main(["export", str(run), *words]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--worker", "3", "--out", "m.safetensors"], "worker 3 is not in this run: give 0 to 2."),
        (["--worker", "-1", "--out", "m.safetensors"], "worker -1 is not in this run"),
        (["--worker", "two", "--out", "m.safetensors"], "--worker: 'two' is not a whole number."),
        (["--worker", "1", "--out", "/proc/m.safetensors"], "/proc/m.safetensors"),
        (["--worker", "1", "--out", "m.pt"], "--out m.pt: the file will be in safetensors format: give a name"),
        (["--worker", "1"], "--out"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture, finished: Path) -> None:
    assert main(["export", str(finished), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_runs_own_files_are_not_written_over(capsys: pytest.CaptureFixture, finished: Path) -> None:
    path = finished / "models.safetensors"
    before = path.read_bytes()
    assert main(["export", str(finished), "--worker", "1", "--out", str(path)]) == 2
    assert "models.safetensors is a file of the run itself: give another name." in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_link_to_itself_is_not_a_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    assert main(["export", str(tmp_path / "run"), "--worker", "1", "--out", str(tmp_path / "x.safetensors")]) == 2
    assert "run is not a run directory" in capsys.readouterr().err
