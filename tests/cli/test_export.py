"""``export``: a file that holds one worker's net and says how to use it."""

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from manyheads.cli import main
from manyheads.models import build
from manyheads.store import Run


def test_the_file_explains_itself(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["export", str(finished), "--worker", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with safetensors.safe_open(out, "pt") as file:
        about = json.loads(file.metadata()["manyheads"])
    assert (about["worker"], about["algorithm"], about["data"]) == (2, "deprl", "digits")
    model = build(
        about["net"], tuple(about["input_shape"]), about["num_outputs"], head=about["head"], norm=about["norm"]
    )
    model.load_state_dict(safetensors.torch.load_file(out))
    x = torch.rand(5, *about["input_shape"])
    assert torch.equal(model.eval()(x), Run.open(finished).model(2)(x))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--worker", "3", "--out", "m.safetensors"], "worker 3 is not in this run: give 0 to 2."),
        (["--worker", "-1", "--out", "m.safetensors"], "worker -1 is not in this run"),
        (["--worker", "two", "--out", "m.safetensors"], "--worker: invalid int value: 'two'"),
        (["--worker", "1", "--out", "/proc/m.safetensors"], "/proc/m.safetensors"),
        (["--worker", "1"], "--out"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture, finished: Path) -> None:
    assert main(["export", str(finished), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
