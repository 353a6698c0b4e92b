"""``report``: the page's path alone on the last line, what was left out before it, and one line for a mistake."""

import shutil
from pathlib import Path

import pytest

from manyheads.cli import main


def test_a_run_is_reported(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "one")
    stopped = shutil.copytree(finished, tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write("half a li\n")
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "note: 1 unfinished run is left out.",
        "note: 1 damaged line of a run's metrics is skipped.",
    ]
    assert lines[-1] == str(tmp_path / "report.html")
    assert any(line.startswith("DePRL  ") for line in lines), "the table"
    assert "DePRL on digits" in (tmp_path / "report.html").read_text()


def test_the_run_of_sites_needs_no_other_seed(capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for seeds in (1, 0):
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out.count("seed") == seeds
        description = (run / "experiment.json").read_text()
        (run / "experiment.json").write_text(description.replace('"digits"', '"site-{worker}.npz"'))


def test_a_single_run_in_a_folder_that_cannot_be_written(
    capsys: pytest.CaptureFixture, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "csv").touch()
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Fix that and start again, or report on a copy of the folder."), "report has no --out"
    (run / "csv").unlink()
    assert main(["report", str(run)]) == 0
    assert "1 run<" in (run / "report.html").read_text()


def test_a_mistake_is_one_line_and_writes_nothing(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder, message in ((tmp_path, "holds no run"), (tmp_path / "missing", "is not a folder")):
        assert main(["report", str(folder)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
