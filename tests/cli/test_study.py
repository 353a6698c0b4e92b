"""``manyheads study``: a small study from beginning to end, without what only reports need, and two at once."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from manyheads.cli import board, study
from manyheads.cli.parser import Parser
from manyheads.errors import UserError
from manyheads.files import locked
from manyheads.studies import STUDIES

SMALL = ["--quick", "--only", "dirichlet=0.1", "--device", "cpu", "--threads", "1"]


def _study(*words: str) -> None:
    parser = Parser(prog="manyheads")
    study.add(parser.add_commands())
    args = parser.parse(["study", *words])
    args.run(args)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_list(capsys: pytest.CaptureFixture) -> None:
    _study("--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*STUDIES, "all"]


def test_dry_run_says_what_it_takes_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _study("table3", "--dry-run", "--device", "cpu", "--only", "data=cifar10", "algorithm=deprl")
    out = capsys.readouterr().out
    assert "cifar10-deprl-dirichlet0.5-ring-128-seed1234" in out
    assert "12 runs, 0 of them recorded." in out
    assert "estimates" in out
    _study("similarity", "--dry-run", "--device", "cpu", "--quick")
    assert "1 run, 0 of them recorded." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_small_study_from_beginning_to_end(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _study("consensus", *SMALL)
    out = capsys.readouterr().out
    assert "consensus: 2 of 2 runs still to be made" in out
    assert out.splitlines()[-1] == "runs/quick/consensus.md"
    page = (tmp_path / "runs/quick/consensus.md").read_text()
    assert "2 of 6 runs are recorded." in page
    assert "consensus-digits.svg" in page
    assert list((tmp_path / "runs/studies").iterdir()) == []
    _study("consensus", *SMALL)
    assert "consensus: 0 of 2 runs still to be made" in capsys.readouterr().out


def test_a_bare_machine_makes_records_and_another_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without the libraries that only people need, as on a machine that only computes."""
    source = Path(study.__file__).parents[2]
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'jinja2'): sys.modules[name] = None\n"
        "from manyheads.cli import study\n"
        "from manyheads.cli.parser import Parser\n"
        "parser = Parser(prog='manyheads')\n"
        "study.add(parser.add_commands())\n"
        "args = parser.parse(sys.argv[1:])\n"
        "args.run(args)\n"
    )
    words = ["consensus", *SMALL, "--no-checkpoints", "--budget-seconds", "500", "--archive", "out/records.zip"]
    done = subprocess.run(
        [sys.executable, "-c", code, "study", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "no report here, as matplotlib is not installed" in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["records.zip"]
    _study("--import", "out/records.zip", "--out", "results")
    assert capsys.readouterr().out.splitlines() == [
        "digits-deprl-dirichlet0.1-ring-8-decay1.0-rounds4-seed1",
        "digits-deprl-dirichlet0.1-ring-8-rounds4-seed1",
    ]
    # A command that goes on packs what was there before it as well.
    gone = "results/records/digits-deprl-dirichlet0.1-ring-8-decay1.0-rounds4-seed1"
    shutil.rmtree(tmp_path / gone)
    _study("consensus", *SMALL, "--out", "results", "--archive", "again.zip", "--quiet")
    with zipfile.ZipFile("again.zip") as archive:
        assert len({Path(name).parent for name in archive.namelist()}) == 2
    for more in ([], ["--report"]):
        _study("consensus", *SMALL, "--out", "results", "--archive", "whole.zip", "--quiet", *more)
        with zipfile.ZipFile("whole.zip") as archive:
            assert len({Path(name).parent for name in archive.namelist()}) == 2, "though nothing was left to do"
        Path("whole.zip").unlink()
    _study("consensus", "--quick", "--report", "--out", "results")
    assert "2 of 6 runs are recorded." in (tmp_path / "results/consensus.md").read_text()


def test_an_archive_that_cannot_be_written_is_noticed_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "records.zip").mkdir()
    with pytest.raises(UserError, match=r"^cannot write records.zip: Is a directory"):
        _study("consensus", *SMALL, "--archive", "records.zip")
    assert not (tmp_path / "runs/studies").exists()


def test_an_archive_of_new_workers_has_the_run_they_build_on_however_often_it_is_written() -> None:
    packed, words = [], [*SMALL, "--only", "algorithm=deprl", "dirichlet=0.1", "--seeds", "1", "--quiet"]
    for _ in range(2):
        _study("table4", *words, "--archive", "records.zip")
        with zipfile.ZipFile("records.zip") as archive:
            packed.append(sorted({Path(name).parent.name for name in archive.namelist()}))
    source = "digits-deprl-dirichlet0.3-ring-8-rounds4-seed1"
    assert packed == [[source, f"{source}-new4-dirichlet0.1"]] * 2


def test_the_time_left_knows_that_new_workers_are_soon_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[board.Shown] = []

    def look(news: object, runs: list[board.Shown], title: str, **options: object) -> dict[str, object]:
        seen.extend(runs)
        return {}

    monkeypatch.setattr(board, "follow", look)
    _study("table4", "--quick", "--only", "algorithm=deprl", "--device", "cpu")
    first, *others = [run.rounds * run.seconds for run in seen]
    # The first makes the run that all of them build on.
    assert others and max(others) < first / 2


def test_all_reports_on_nothing_are_none(capsys: pytest.CaptureFixture) -> None:
    _study("all", "--quick", "--report", "--out", "results")
    assert capsys.readouterr().out == "no report: nothing is recorded in results/records\n"


def test_two_at_once_on_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    with locked(folder), pytest.raises(UserError, match="another run is writing to results"):
        _study("consensus", *SMALL, "--out", "results")
    with locked(folder), pytest.raises(UserError, match="another run is writing to results"):
        _study("--import", "records.zip", "--out", "results")


def test_a_file_where_runs_should_go(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(UserError, match="cannot write taken: File exists"):
        _study("consensus", *SMALL, "--work", "taken")


def test_missing_data_names_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MANYHEADS_DATA", raising=False)
    with pytest.raises(UserError, match=r"put mobiact6\.npz into .*--data-dir"):
        _study("table1", "--only", "data=mobiact", "--data-dir", str(tmp_path))
    assert not (tmp_path / "results/records").exists()


def test_mistakes() -> None:
    with pytest.raises(UserError, match="Did you mean 'theory'"):
        _study("theroy")
    with pytest.raises(UserError, match="all"):
        _study("everything")
    for seconds in ("0", "nan"):
        with pytest.raises(UserError, match=f"--budget-seconds {seconds}"):
            _study("theory", "--budget-seconds", seconds)
    with pytest.raises(UserError, match="--only colour=red"):
        _study("table1", "--quick", "--only", "colour=red")
    with pytest.raises(UserError, match="cannot be read"):
        _study("--import", "nothing.zip")
