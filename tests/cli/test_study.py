"""``manyheads study``: a small study from beginning to end, without what only reports need, and two at once."""

import os
import re
import subprocess
import sys
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
    parser.add_commands("manyheads.cli.", {"study": ""})
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
    assert "consensus: 3 of 3 runs still to be made" in out
    assert out.splitlines()[-1] == "runs/quick/consensus.md"
    page = (tmp_path / "runs/quick/consensus.md").read_text()
    assert "3 of 9 runs are recorded." in page
    assert "consensus-digits-constant-rate.svg" in page
    assert list((tmp_path / "runs/studies").iterdir()) == []
    _study("consensus", *SMALL)
    assert "consensus: 0 of 3 runs still to be made" in capsys.readouterr().out
    assert not (tmp_path / "runs/quick/README.md").exists()
    _study("all", "--quick", "--report", "--quiet")
    *reports, index = capsys.readouterr().out.splitlines()
    assert index == "runs/quick/README.md"
    text = (tmp_path / index).read_text()
    assert f"| [{STUDIES['consensus'].title}](consensus.md) | 3 of 9 runs |" in text
    # The three runs count in other studies too, and once here.
    assert re.search(r" 3 of \d+ different runs are recorded", text)
    assert [f"runs/quick/{page}" for page in re.findall(r"\((\w+\.md)\)", text)] == reports


def test_a_bare_machine_makes_records_and_another_the_report(tmp_path: Path) -> None:
    """Without the libraries that only people need, as on a machine that only computes."""
    source = Path(study.__file__).parents[2]
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'jinja2'): sys.modules[name] = None\n"
        "from manyheads.cli.parser import Parser\n"
        "parser = Parser(prog='manyheads')\n"
        "parser.add_commands('manyheads.cli.', {'study': ''})\n"
        "args = parser.parse(sys.argv[1:])\n"
        "args.run(args)\n"
    )
    words = ["consensus", *SMALL, "--no-checkpoints", "--budget-seconds", "500"]
    done = subprocess.run(
        [sys.executable, "-c", code, "study", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "no report here, as matplotlib is not installed" in done.stdout
    Path("runs/quick").rename("results")
    _study("consensus", "--quick", "--report", "--out", "results")
    assert "3 of 9 runs are recorded." in (tmp_path / "results/consensus.md").read_text()


def test_the_time_left_knows_that_new_workers_are_soon_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[board.Shown] = []

    def look(news: object, runs: list[board.Shown], title: str, **options: object) -> dict[str, object]:
        seen.extend(runs)
        return {}

    monkeypatch.setattr(study, "follow", look)
    _study("table4", "--quick", "--only", "algorithm=deprl", "--device", "cpu")
    first, *others = [run.rounds * run.seconds for run in seen]
    # The first makes the run that all of them build on.
    assert others and max(others) < first / 2


@pytest.mark.parametrize("name", ["all", "table3"])
def test_a_report_on_nothing_is_none(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match="nothing is recorded in results/records"):
        _study(name, "--quick", "--report", "--out", "results")
    assert not Path("results").exists()
    Path("results/records").mkdir(parents=True)
    _study(name, "--quick", "--report", "--out", "results")
    assert capsys.readouterr().out == "no report: nothing is recorded in results/records\n"


def test_two_at_once_on_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    with locked(folder), pytest.raises(UserError, match="another run is writing to results"):
        _study("consensus", *SMALL, "--out", "results")


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


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'theory'"):
        _study("theroy")
    with pytest.raises(UserError, match="all"):
        _study("everything")
    for seconds in ("0", "nan"):
        with pytest.raises(UserError, match=f"--budget-seconds {seconds}"):
            _study("theory", "--budget-seconds", seconds)
    with pytest.raises(UserError, match="--dry-run lists runs and --report makes none"):
        _study("theory", "--dry-run", "--report")
    with pytest.raises(UserError, match=r"^--precision bf16 needs a GPU: use float32, or --device cuda\.$"):
        _study("consensus", *SMALL, "--precision", "bf16")
    assert not any(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"^no study given: name one of table1, .*, or all; --list "):
        _study("--report")
    with pytest.raises(UserError, match="--only colour=red"):
        _study("table1", "--quick", "--only", "colour=red")
