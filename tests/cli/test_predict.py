"""``predict``: the same answers as the net gives in Python, and clear words about input that does not fit."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import Experiment, Runtime, data, from_arrays, train
from manyheads.cli import main, predict, terminal
from manyheads.data.cifar import CIFAR10
from manyheads.data.pixels import Pixels
from manyheads.store import Run


def _predict(finished: Path, path: Path, *words: str) -> int:
    return main(["predict", str(finished), "--worker", "1", "--data", str(path), *words])


def _trained(out: Path, dataset: data.Dataset, split: str = "iid", **given: Any) -> Path:
    """A small run on data of one's own, two workers."""
    experiment = Experiment(data=dataset, split=split, workers=2, rounds=1, model="mlp:4", **given)
    (_,) = train(experiment, Runtime(out=out, device="cpu"))
    return out


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
    right = f"accuracy {100 * (wanted == y).mean():.1f} % on 50 samples"
    said = f"{out}\n{right}, whatever classes worker 1 was trained on\n"
    assert capsys.readouterr().out == said
    with np.load(out) as saved:
        assert saved["classes"].tolist() == wanted.tolist()
        assert saved["probabilities"].shape == (50, 10)
        assert np.allclose(saved["probabilities"].sum(1), 1)


def _assert_same(run: Path, x: np.ndarray, inputs: np.ndarray, tmp_path: Path) -> None:
    """To the net, samples are no others than these inputs."""
    said = []
    for samples in (x, inputs):
        np.savez(tmp_path / "x.npz", x=samples)
        assert _predict(run, tmp_path / "x.npz", "--out", str(tmp_path / "y.npz")) == 0
        with np.load(tmp_path / "y.npz") as saved:
            said.append(saved["probabilities"])
    assert np.array_equal(*said)


def test_bytes_become_what_the_net_was_trained_on(finished: Path, tmp_path: Path) -> None:
    inputs = data.load("digits").x_test[:20].numpy()
    recorded = (inputs * 16).astype(np.uint8)
    _assert_same(finished, recorded, inputs, tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    own = _trained(tmp_path / "own", from_arrays(pixels, np.arange(20) % 2))
    _assert_same(own, pixels, pixels.astype(np.float32) / 255, tmp_path)


def test_bytes_are_standardised_as_the_data_set_was(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8), dtype=np.uint8)
    how = Pixels(mean=CIFAR10.mean, std=CIFAR10.std)
    inputs = how.to_inputs_(torch.from_numpy(pixels).float())
    images = replace(from_arrays(inputs, np.arange(20) % 2), pixels=how)
    _assert_same(_trained(tmp_path / "run", images), pixels, inputs.numpy(), tmp_path)


def test_bytes_that_the_net_knows_nothing_of_are_refused(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=pixels)
    assert _predict(finished, tmp_path / "x.npz") == 2
    assert "x goes up to 255, but the net's pixels go from 0 to 16: give x in that range." in capsys.readouterr().err
    floats = _trained(tmp_path / "floats", from_arrays(pixels / 255, np.arange(20) % 2))
    assert _predict(floats, tmp_path / "x.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "x holds bytes, but the net was not trained on bytes: give x as floats like its train samples." in line


def test_an_answer_that_is_not_a_number(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 64))
    run = _trained(tmp_path / "run", from_arrays(x, np.arange(20) % 2))
    # All terms of the first unit's sum have one sign, and the sum is too large for float32.
    weight = next(iter(Run.open(run).model(1).parameters()))
    np.savez(tmp_path / "x.npz", x=3e38 * weight[:1].sign().numpy(force=True))
    assert _predict(run, tmp_path / "x.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the net's answer to sample 0 is not a number: give x like its train samples." in line


def test_pixels_that_are_no_bytes_any_more_are_refused(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", x=data.load("digits").x_test[:20].numpy() * 16)
    assert _predict(finished, tmp_path / "x.npz") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "x goes up to 16, but bytes become inputs as byte / 16: give x as bytes (uint8), or as such inputs." in line


def test_classes_without_a_test_sample_are_classes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 4), dtype=np.float32)
    # Nobody trains on the class of the test samples, so nobody has any of them.
    untested = from_arrays(x, np.arange(20) % 2, x[:3], np.full(3, 2))
    run = _trained(tmp_path / "run", untested, split="dirichlet:9")
    assert json.loads((run / "summary.json").read_text())["majority_floor"] is None
    np.savez(tmp_path / "x.npz", x=x)
    assert _predict(run, tmp_path / "x.npz") == 0
    assert len(capsys.readouterr().out.split()) == 20


def _assert_outputs(run: Path, x: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The numbers that the net gives in Python, [samples, 1], whatever y."""
    with torch.inference_mode():
        wanted = Run.open(run).model(1)(torch.from_numpy(x)).numpy()
    np.savez(tmp_path / "x.npz", x=x, y=x[:, 0])
    assert _predict(run, tmp_path / "x.npz") == 0
    assert np.array_equal(np.float32(capsys.readouterr().out.split()), wanted[:, 0])
    assert _predict(run, tmp_path / "x.npz", "--out", str(tmp_path / "y.npz")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'y.npz'}\n"
    with np.load(tmp_path / "y.npz") as saved:
        assert saved.files == ["outputs"]
        assert np.array_equal(saved["outputs"], wanted)


def test_a_regression_gives_its_outputs(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    def squared(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - y).square()

    x = np.random.default_rng(0).random((20, 4), dtype=np.float32)
    run = _trained(tmp_path / "run", from_arrays(x, x[:, 0]), loss=squared)
    _assert_outputs(run, x, tmp_path, capsys)


def one_logit(input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(*input_shape, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))


def test_a_net_without_a_score_for_each_class_gives_its_outputs(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    def binary(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        target = y.to(output.dtype)
        return torch.nn.functional.binary_cross_entropy_with_logits(output[:, 0], target, reduction="none")

    x = np.random.default_rng(0).random((20, 4), dtype=np.float32)
    experiment = Experiment(
        data=from_arrays(x, np.arange(20) % 2), model=f"{__name__}:one_logit", loss=binary, metric=binary,
        split="iid", workers=2, rounds=1,
    )  # fmt: skip
    list(train(experiment, Runtime(out=tmp_path / "run", device="cpu")))
    _assert_outputs(tmp_path / "run", x, tmp_path, capsys)


def test_a_net_sees_few_samples_at_a_time() -> None:
    net, sizes = torch.nn.Linear(3, 2), []
    net.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    assert predict._outputs(net, torch.rand(300, 3)).shape == (300, 2)
    assert sizes == [128, 128, 44]


def test_what_takes_long_is_said_beside_the_classes(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((5, 1, 8, 8)))
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.0)
    calculate = predict._outputs

    def slowly(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return calculate(net, x)

    monkeypatch.setattr(predict, "_outputs", slowly)
    assert _predict(finished, tmp_path / "x.npz") == 0
    said = capsys.readouterr()
    assert said.err == "predicting 5 samples ...\n"
    assert len(said.out.split()) == 5


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
        ({"x": np.zeros((5, 3))}, "samples are [3], but the net takes"),
        ({"y": np.zeros(5)}, "needs an array x"),
        ({"x": np.zeros((0, 3))}, "x is float64 [0, 3]: give numbers [samples, ...]."),
        ({"x": np.array([["a"], ["b"]])}, "x is <U1 [2, 1]: give numbers [samples, ...]."),
        ({"x": np.zeros(64)}, "x is float64 [64]: give numbers [samples, ...], such as x[None] of one sample."),
        ({"x": np.full((5, 3), np.inf)}, "x holds NaN, infinite or too large numbers (first in sample 0)"),
        ({"x": np.full((5, 3), 1e200)}, "x holds NaN, infinite or too large numbers (first in sample 0)"),
        ({"x": np.zeros((5, 1, 8, 8)), "y": np.zeros(4, int)}, "a class for each of the 5 samples"),
        ({"x": np.zeros((5, 1, 8, 8)), "y": np.zeros(5)}, "a class for each of the 5 samples"),
        (
            {"x": np.zeros((2, 1, 8, 8)), "y": np.array([-1, 3])},
            "y goes from -1 to 3, but the net's classes are 0 to 9: number",
        ),
        (
            {"x": np.zeros((2, 1, 8, 8)), "y": np.array([1, 10])},
            "to 9: number them as the run's data do, or give no y.",
        ),
        ({"x": np.array([{}, {}], dtype=object)}, "x is an array of Python objects: give x.astype(float)."),
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
