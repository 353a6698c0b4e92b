"""``inspect constants``: estimates at the end of a run, through the command line."""

from pathlib import Path

import numpy as np
import pytest

from manyheads.cli import main


@pytest.fixture
def trained(tmp_path: Path, capsys: pytest.CaptureFixture):
    def train(algorithm: str, *options: str) -> Path:
        out = tmp_path / algorithm
        words = ["--workers", "4", "--model", "mlp:8", "--rounds", "1", "--out", str(out), "--quiet", *options]
        assert main(["train", algorithm, *words]) == 0
        capsys.readouterr()
        return out

    return train


def test_what_the_theory_assumes(trained, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "constants", str(trained("deprl", "--head-epochs", "3", "--head-lr", "0.1"))]) == 0
    out = capsys.readouterr().out.splitlines()
    found = dict(line.split("  ", 1) for line in out if "  " in line.strip())
    assert found["after round"].strip() == "1"
    assert found["rates"].strip() == "0.196 for the representation, 0.098 for the heads"
    smoothness = [float(word) for word in found["L"].split() if word[0].isdigit()]
    assert len(smoothness) == 2 and min(smoothness) > 0
    # The theorem is asked with what was measured and run, not with L = 1 and the paper's tau.
    assert f"L = {max(smoothness):.3g}, tau = 3" in found["theorem 1"]
    assert all(float(found[name].split()[0].rstrip(":")) > 0 for name in ("sigma^2", "varsigma^2"))
    terms = [float(out[line].split()[-1]) for line in range(-5, 0)]
    assert sum(terms) == pytest.approx(float(out[-6].split()[2]), rel=0.01) and min(terms) > 0
    noise = max(float(word) for word in found["sigma^2"].split()[:5] if word[0].isdigit())
    assert terms[1] == pytest.approx(2 * 0.2 * max(smoothness) / 4 * noise, rel=0.02), "with the first rate, 0.2"
    assert terms[3] == pytest.approx(2 * 0.1**2 * 3 * max(smoothness) / 0.2 * noise, rel=0.02), "and the heads, 0.1"


def test_heads_that_move_with_the_rest_have_its_rate(trained, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "constants", str(trained("d-psgd", "--lr", "0.1", "--head-lr", "0.03"))]) == 0
    out = capsys.readouterr().out.splitlines()
    found = dict(line.split("  ", 1) for line in out if "  " in line.strip())
    assert found["rates"].strip() == "0.098 for the representation, 0.098 for the heads", "one round has gone by"
    smoothness = max(float(word) for word in found["L"].split() if word[0].isdigit())
    noise = max(float(word) for word in found["sigma^2"].split()[:5] if word[0].isdigit())
    assert float(out[-2].split()[-1]) == pytest.approx(2 * 0.1**2 * smoothness / 0.1 * noise, rel=0.02), out[-2]


def test_heads_of_new_workers_have_a_rate_of_their_own(trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    joined = tmp_path / "joined"
    words = ["--workers", "3", "--head-epochs", "1", "--head-lr", "0.5", "--out", str(joined), "--quiet"]
    assert main(["join", str(trained("deprl", "--lr", "0.1")), *words]) == 0
    capsys.readouterr()
    assert main(["inspect", "constants", str(joined)]) == 0
    assert "0.1 for the representation, 0.5 for the heads" in capsys.readouterr().out


def test_where_the_theorem_does_not_apply_there_is_no_bound(trained, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "constants", str(trained("deprl", "--link-failure", "0.3"))]) == 0
    out = capsys.readouterr().out
    assert "does not apply" in out and "its bound" not in out


def test_a_flat_loss_says_nothing_of_the_theorem(trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, y = tmp_path / "far.npz", np.arange(80) % 2
    # So far apart that the trained net's probabilities are 0 and 1, and its loss and gradients 0.
    np.savez(path, x=np.repeat(1000.0 * (2 * y - 1)[:, None], 4, axis=1).astype(np.float32), y=y)
    rates = ("--lr", "0.5", "--head-lr", "0.5")
    run = trained("deprl", "--data", str(path), "--split", "iid", "--rounds", "5", *rates)
    assert main(["inspect", "constants", str(run)]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split(maxsplit=2)
    assert last == ["theorem", "1", "says nothing where L is 0"]


def test_two_heads_are_not_what_the_theory_is_about(trained, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "constants", str(trained("fedrod"))]) == 2
    error = capsys.readouterr().err
    assert "no representation with a single head" in error and len(error.splitlines()) == 1


def test_data_that_have_changed_since(trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "my.npz"
    x, y = np.arange(120.0).reshape(40, 3), np.arange(40) % 2
    np.savez(path, x=x, y=y)
    run = trained("deprl", "--data", str(path), "--split", "iid")
    np.savez(path, x=x + 1, y=y)
    assert main(["inspect", "constants", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"manyheads: {run} was not trained on the data that {path} holds now: put the old data back."


def test_sites_whose_models_are_in_no_one_place(trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for worker in range(4):
        np.savez(tmp_path / f"{worker}.npz", x=np.arange(60.0).reshape(20, 3), y=np.arange(20) % 2)
    run = trained("deprl", "--data", str(tmp_path / "{worker}.npz")) / "site-0"
    assert main(["inspect", "constants", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"manyheads: {run} is a single site's, but the theory is about the mean of all workers: give another run."
    )


def test_a_server_has_no_graph_for_the_theorem(trained, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "constants", str(trained("fedrep"))]) == 0
    text = capsys.readouterr().out
    assert "varsigma^2" in text and "theorem" not in text
