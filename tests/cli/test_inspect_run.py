"""``inspect run``: what ran, what was unusual about it, and where it stands."""

import json
import shutil
from pathlib import Path

import pytest

from manyheads import Experiment, Runtime
from manyheads.algorithms import DPSGD, REGISTRY, FedAvg
from manyheads.cli import main
from manyheads.rounds import run as rounds_of
from manyheads.session import open_session


def _inspect(capsys: pytest.CaptureFixture, path: Path) -> list[str]:
    assert main(["inspect", "run", str(path)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_finished_run(capsys: pytest.CaptureFixture, finished: Path) -> None:
    lines = [" ".join(line.split()) for line in _inspect(capsys, finished)]
    assert lines[0] == "DePRL on digits: 3 workers, dirichlet:0.3, full, mlp:64, 2 rounds"
    assert {"seed 1", "rounds 2 of 2", "state complete"} <= set(lines)
    options = sorted(line for line in lines if line.startswith("option "))
    assert options == ["option --graph full", "option --head-epochs 1", "option --workers 3"]


def test_a_finished_run_whose_log_has_lost_its_end(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    whole = _inspect(capsys, run)
    for content in ((run / "metrics.jsonl").read_text().splitlines()[0] + "\n", ""):
        (run / "metrics.jsonl").write_text(content)
        lines = _inspect(capsys, run)
        assert [line for line in lines if "metrics.jsonl has lost the last rounds" not in line] == whole
        assert len(lines) == len(whole) + 1


def test_a_site_shows_its_own_workers(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    site = {"workers": [1, 2], "away": {}, "disturbances": []}
    (run / "site.json").write_text(json.dumps(site))
    scores = [1.0, 0.625, None]
    *_, last = map(json.loads, (run / "workers.jsonl").read_text().splitlines())
    with (run / "workers.jsonl").open("a") as file:
        file.write(json.dumps({**last, "accuracy": scores}) + "\n")
    lines = [" ".join(line.split()) for line in _inspect(capsys, run)]
    own = [line for line in lines if line.startswith("worker here")]
    assert own == ["worker here 1, accuracy 62.5 %", "worker here 2, accuracy –"]


def test_an_unfinished_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    runtime = Runtime(out=tmp_path / "run", checkpoint_every=2)
    steps = rounds_of(
        open_session(Experiment(algorithm=FedAvg(), workers=3, rounds=9, batch_size=8, relabel=True), runtime)
    )
    assert [next(steps).round for _ in range(3)] == [1, 2, 3]
    steps.close()
    lines = [" ".join(line.split()) for line in _inspect(capsys, tmp_path / "run")]
    assert {"rounds 3 of 9", "state not complete; continues from round 2"} <= set(lines)
    # The simulated clock's seconds follow from the batch size: nobody gave them.
    assert sorted(line for line in lines if line.startswith("option ")) == [
        "option --batch-size 8",
        "option --relabel",
        "option --workers 3",
    ]


def test_the_net_that_own_images_have_by_default_is_nothing_unusual(capsys, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    path = run / "experiment.json"
    path.write_text(path.read_text().replace('"data": "digits"', '"data": "mine.npz"').replace('"mlp:64"', '"cnn"'))
    assert not any("--model" in line for line in _inspect(capsys, run))


def test_arrays_of_which_workers_keep_their_own_are_nothing_unusual(capsys, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    path = run / "experiment.json"
    text = path.read_text().replace('"data": "digits"', '"data": {"kind": "arrays"}')
    path.write_text(text.replace('"dirichlet:0.3"', '"natural"'))
    assert not any("--split" in line for line in _inspect(capsys, run))


def test_a_run_of_an_algorithm_that_is_not_registered(
    capsys, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    path = run / "experiment.json"
    path.write_text(path.read_text().replace('"name": "deprl"', '"name": "mine", "every": 3'))
    summary = (run / "summary.json").read_text()
    for title, said in (None, "mine on digits: "), ("My own", "My own on digits: "):
        (run / "summary.json").write_text(json.dumps({**json.loads(summary), "title": title}))
        lines = [" ".join(line.split()) for line in _inspect(capsys, run)]
        assert lines[0].startswith(said) and "option --every 3" in lines
    monkeypatch.setitem(REGISTRY, "mine", type("Mine", (DPSGD,), {"name": "mine", "title": "Renamed"}))
    assert _inspect(capsys, run)[0].startswith("Renamed on digits: ")


def test_damage(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accur')
    assert any("damaged lines of metrics.jsonl, left out: 1" in line for line in _inspect(capsys, broken))
    (broken / "experiment.json").write_text("{}")
    assert main(["inspect", "run", str(broken)]) == 2
    assert "experiment.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "model.json", "experiment.json"])
def test_edited_files_of_a_run_end_in_one_line_or_in_none(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    whole = json.loads((run / name).read_text())
    commands = (
        ["inspect", "run", str(run)],
        ["export", str(run), "--worker", "0", "--out", str(tmp_path / "model.safetensors")],
    )
    for key in whole:
        for edited in ({**whole, key: [1]}, {other: value for other, value in whole.items() if other != key}):
            (run / name).write_text(json.dumps(edited))
            for words in commands:
                status = main(words)
                lines = capsys.readouterr().err.splitlines()
                assert (status, len(lines)) in ((0, 0), (2, 1)), (words, edited)
