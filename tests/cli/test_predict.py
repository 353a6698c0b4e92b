"""``predict``: the same answers as the net gives in Python, and clear words about input that does not fit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads import data
from manyheads.cli import main
from manyheads.store import Run


def _predict(finished: Path, path: Path, *words: str) -> int:
    return main(["predict", str(finished), "--worker", "1", "--data", str(path), *words])


def test_predictions(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    digits = data.load("digits")
    x, y = digits.x_test[:50], digits.y_test[:50].numpy()
    with torch.inference_mode():
        wanted = Run.open(finished).model(1)(x).argmax(1).numpy()
    path, out = tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(path, x=x.numpy())
    assert _predict(finished, path) == 0
    assert [int(line) for line in capsys.readouterr().out.splitlines()] == wanted.tolist()
    np.savez(path, x=x.numpy(), y=y)
    assert _predict(finished, path, "--out", str(out)) == 0
    said = f"{out}\naccuracy {100 * (wanted == y).mean():.1f} % on 50 samples\n"
    assert capsys.readouterr().out == said
    with np.load(out) as saved:
        assert saved["classes"].tolist() == wanted.tolist()
        assert saved["probabilities"].shape == (50, 10)
        assert np.allclose(saved["probabilities"].sum(1), 1)


def test_bytes_are_pixels(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    shape = data.load("digits").x_test.shape[1:]
    pixels = np.random.default_rng(0).integers(0, 256, (20, *shape), dtype=np.uint8)
    said = []
    for x in (pixels, pixels / 255):
        np.savez(tmp_path / "x.npz", x=x)
        assert _predict(finished, tmp_path / "x.npz") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_no_accuracy_in_classes_of_the_workers_own(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    text = (run / "experiment.json").read_text()
    (run / "experiment.json").write_text(text.replace('"relabel": false', '"relabel": true'))
    digits = data.load("digits")
    np.savez(tmp_path / "x.npz", x=digits.x_test[:5].numpy(), y=digits.y_test[:5].numpy())
    assert _predict(run, tmp_path / "x.npz") == 0
    said = "no accuracy: after --relabel, worker 1 numbers the classes in its own order\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((5, 3))}, "samples are [3], the net takes"),
        ({"y": np.zeros(5)}, "needs an array x"),
        ({"x": np.zeros((0, 3))}, "needs an array x"),
        ({"x": np.array(["a", "b"])}, "needs an array x"),
        ({"x": np.full((5, 3), np.inf)}, "x holds NaN, infinite or too large numbers (first in sample 0)"),
        ({"x": np.full((5, 3), 1e200)}, "x holds NaN, infinite or too large numbers (first in sample 0)"),
        ({"x": np.zeros((5, 3)), "y": np.zeros(4, int)}, "a class for each of the 5 samples"),
        ({"x": np.zeros((5, 3)), "y": np.zeros(5)}, "a class for each of the 5 samples"),
        ({"x": np.zeros((2, 1, 8, 8)), "y": np.array([-1, 3])}, "y goes from -1 to 3; the net's classes are 0 to 9"),
        ({"x": np.zeros((2, 1, 8, 8)), "y": np.array([1, 10])}, "y goes from 1 to 10; the net's classes are 0 to 9"),
        ({"x": np.array([{}, {}], dtype=object)}, "not an npz of plain arrays"),
    ],
)
def test_mistakes(arrays: dict, said: str, capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    assert _predict(finished, tmp_path / "x.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_only_npz_is_written(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 1, 8, 8)))
    assert _predict(finished, tmp_path / "x.npz", "--out", str(tmp_path / "y.csv")) == 2
    assert "give a name ending in .npz." in capsys.readouterr().err


def test_the_samples_are_not_written_over(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 1, 8, 8)))
    before = (tmp_path / "x.npz").read_bytes()
    assert _predict(finished, tmp_path / "x.npz", "--out", str(tmp_path / "." / "x.npz")) == 2
    assert "x.npz holds the samples: give another name." in capsys.readouterr().err
    assert (tmp_path / "x.npz").read_bytes() == before


def test_no_file(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    assert _predict(finished, tmp_path / "absent.npz") == 2
    assert "absent.npz: give the path" in capsys.readouterr().err
    (tmp_path / "text.npz").write_text("no zip file")
    assert _predict(finished, tmp_path / "text.npz") == 2
    assert "not an npz" in capsys.readouterr().err
