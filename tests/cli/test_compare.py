"""``compare`` end to end: the table, the report, a second call, a grid, tuning, failures, kill -9 and mistakes."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.cli import compare, main
from manyheads.cli.tables import result_table
from manyheads.errors import UserError
from manyheads.files import locked
from manyheads.jobs import Job, News
from manyheads.report import open_comparison
from manyheads.store import Run

SMALL = ["--workers", "3", "--rounds", "2", "--model", "mlp:8", "--threads", "1"]


@pytest.fixture(autouse=True)
def _in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the report out: it takes longer than the runs do, and has tests of its own."""
    monkeypatch.setattr("manyheads.cli.compare.write", lambda comparison: comparison.folder / "report.html")


def _compare(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    """The lines that a comparison prints."""
    assert main(["compare", *words]) == 0
    caught = capsys.readouterr()
    assert caught.err == ""
    return caught.out.splitlines()


def _runs(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*/*") if path.is_file() and "-" in path.parts[1]}


def test_a_regression_is_compared_and_tuned_with_functions_by_name(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    Path("my_scores.py").write_text("def squared(output, target):\n    return (output - target).square().sum(1)\n")
    monkeypatch.syspath_prepend(Path.cwd())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4))
    np.savez("line.npz", x=x, y=x @ rng.normal(size=(4, 1)))
    own = ["--data", "line.npz", "--split", "iid", "--loss", "my_scores:squared", "--lr", "0.01"]
    lines = _compare(
        capsys, "deprl", "local", *SMALL, *own, "--tune", "0.01", "1", "--seeds", "1", "2", "--out", "both"
    )
    table = "\n".join(lines)
    assert "score" in table and "accuracy, %" not in table
    chosen = [Run.open(path.parent) for path in Path("both").glob("*-*/summary.json")]
    assert len(chosen) == 4 and all(run.description["loss"] == "my_scores:squared" for run in chosen)
    assert {run.description["lr"] for run in chosen} == {0.01}, "not the hundredth of it, which learns next to nothing"
    assert main(["join", str(chosen[0].path), "--workers", "2", "--split", "iid", "--out", "joined", "--quiet"]) == 0
    assert Run.open("joined").description["loss"] == "my_scores:squared"


def test_table_report_and_a_second_call(capsys: pytest.CaptureFixture, request: pytest.FixtureRequest) -> None:
    words = ["deprl", "fedavg", "local", *SMALL, "--graph", "ring", "full", "--seeds", "1", "12", "--out", "all"]
    lines = _compare(capsys, *words)
    assert lines[-1] == "all/report.html"
    assert Path("all/report.html").exists()
    names = sorted(path.name.partition("-")[0] for path in Path("all").iterdir() if (path / "summary.json").exists())
    # fedavg and local look at no graph, so that they run once for each seed.
    assert names == ["deprl"] * 4 + ["fedavg"] * 2 + ["local"] * 2
    for path in Path("all").glob("deprl-*"):
        assert path.name == f"deprl-{Run.open(path).experiment.run_id}"
    table = [line for line in lines if " ± " in line or "majority floor" in line]
    for graph, rows in (("full", table[:4]), ("ring", table[4:8])):
        own = {"DePRL": graph, "FedAvg": "server", "Local": "none", "majority floor": graph}
        found = [re.split(r" {2,}", row)[:2] for row in rows]
        assert dict(found) == own
        assert "*" in max(rows, key=lambda row: float(re.findall(r"\d+\.\d", row)[0]))
    assert any("standard error" in line for line in lines)

    before = _runs("all")
    request.getfixturevalue("undrawn")
    again = _compare(capsys, *words)
    assert again[0] == "running  8 of 8 runs finished before"
    assert [line for line in again if " ± " in line] == [line for line in lines if " ± " in line]
    assert _runs("all") == before


@pytest.mark.usefixtures("without_pictures")
def test_several_data_sets(capsys: pytest.CaptureFixture) -> None:
    numbers = np.random.default_rng(0)
    np.savez("mine.npz", x=numbers.random((60, 5)), y=np.arange(60) % 3)
    words = ["--workers", "3", "--rounds", "2", "--threads", "1", "--seeds", "1", "--out", "all"]
    lines = _compare(capsys, "deprl", "local", "--data", "digits", "mine.npz", *words)
    assert any("local, data mine.npz: accuracy" in line for line in lines)
    for data in ("digits", "mine.npz"):
        rows = [line.split()[0] for line in lines if f" {data} " in line]
        assert sorted(rows) == ["DePRL", "Local", "majority"]
    page = Path("all/report.html").read_text()
    assert "Options that follow from the data set" in page and "4 runs" in page


def test_scores_and_work_that_are_not_alike_are_told(capsys: pytest.CaptureFixture, undrawn: None) -> None:
    words = ["--preset", "original", "--workers", "3", "--rounds", "1", "--threads", "1", "--seeds", "1"]
    # Sentences are wrapped to the width of the terminal.
    said = " ".join(_compare(capsys, "deprl", "dispfl", *words, "--out", "two"))
    assert "note: scored as local training leaves them, not after mixing (order mix-train): DisPFL" in said
    assert "note: local work in a round: 3 passes (DePRL); 5 passes (DisPFL)" in said


def test_a_narrow_terminal_gets_the_first_columns(
    capsys: pytest.CaptureFixture, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["deprl", "local", *SMALL, "--seeds", "1", "2", "--out", "all"]
    whole = "\n".join(_compare(capsys, *words))
    comparison = open_comparison(Path("all"))
    assert result_table(comparison) in whole
    lines = result_table(comparison, 80).splitlines()
    assert 60 < max(map(len, lines)) <= 80
    assert "accuracy" in lines[0] + lines[1]
    legend, *ahead, left_out = lines[next(i for i, line in enumerate(lines) if line.startswith("* best")) :]
    assert "standard error" in legend and len(ahead) > 1, "sentences are wrapped"
    assert re.match(r"(DePRL|Local) reaches .* ahead of (DePRL|Local)", " ".join(ahead))
    assert left_out == "in the report: consensus error, sent per worker, time"
    assert "accuracy" in result_table(comparison, 1)
    monkeypatch.setenv("COLUMNS", "80")
    assert result_table(comparison, 80) in "\n".join(_compare(capsys, *words))


def test_of_one_system_the_legend_explains_what_is_there(capsys: pytest.CaptureFixture, undrawn: None) -> None:
    lines = _compare(capsys, "deprl", *SMALL, "--seeds", "1", "2", "--out", "all")
    assert "± deviation over 2 seeds" in lines
    assert not any("best" in line for line in lines)


def test_a_run_that_is_refused_is_no_part_of_the_table(capsys: pytest.CaptureFixture, undrawn: None) -> None:
    def write(level: float) -> None:
        np.savez("my.npz", x=np.full((60, 4), level, np.float32), y=np.arange(60) % 3)

    words = ["local", *SMALL, "--data", "my.npz", "--out", "all", "--seeds"]
    write(1.0)
    _compare(capsys, *words, "5")
    write(2.0)
    assert main(["compare", *words, "5", "6"]) == 2
    caught = capsys.readouterr()
    assert "1 failed: local" in caught.err and "was not begun on the data" in caught.err
    assert "one seed (6), so no deviation" in caught.out, "seed 5 has seen other data"


def test_more_rounds_than_asked_for_are_said(capsys: pytest.CaptureFixture, undrawn: None) -> None:
    words = ["local", *SMALL, "--seeds", "2", "--out", "all"]
    assert not any("more rounds" in line for line in _compare(capsys, *words, "--rounds", "3"))
    said = "note: 1 run had more rounds than asked for, and the last is shown."
    assert said in _compare(capsys, *words, "--rounds", "2")


def test_one_seed_is_said(capsys: pytest.CaptureFixture, undrawn: None) -> None:
    lines = _compare(capsys, "local", *SMALL, "--seeds", "2", "--out", "two")
    assert "one seed (2), so no deviation: run others too" in lines
    lines = _compare(capsys, "deprl", "local", *SMALL, "--seeds", "1", "--out", "one")
    assert "* best; one seed (1), so no deviation: run others too" in lines


def test_measured_times_are_shown_with_a_warning(
    capsys: pytest.CaptureFixture, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["deprl", "local", *SMALL, "--seeds", "1", "--out", "both"]
    for columns, shown in (("200", True), ("80", False)):
        monkeypatch.setenv("COLUMNS", columns)
        assert any(line.startswith("time: measured") for line in _compare(capsys, *words)) == shown


@pytest.mark.usefixtures("without_pictures")
def test_tuning_on_as_the_note_advises(capsys: pytest.CaptureFixture) -> None:
    words = ["local", *SMALL, "--seeds", "1", "2", "--out", "tuned", "--tune"]
    lines = _compare(capsys, *words, "1e-9", "1e-3")
    assert any("give --tune factors beyond it: Local" in line for line in lines)
    assert not any("beyond" in line for line in _compare(capsys, *words[:-2], "one", "--tune", "1"))
    assert sum(": validation " in line for line in lines) == 3, "the better rates with both seeds"
    _compare(capsys, *words, "1e-9", "1e-3", "0.5")
    assert main(["report", "tuned"]) == 0
    assert capsys.readouterr().err == ""
    rates = list(csv.DictReader(Path("tuned/csv/rates.csv").read_text().splitlines()))
    assert [(float(line["lr"]), line["chosen"]) for line in rates] == [
        (2e-10, "False"),
        (2e-4, "False"),
        (0.1, "True"),
    ]


@pytest.mark.usefixtures("undrawn")
def test_tuning(capsys: pytest.CaptureFixture) -> None:
    words = ["deprl", "local", *SMALL, "--relabel", "--seeds", "2", "1", "--tune", "0.5", "1e-9", "--out", "tuned"]
    lines = _compare(capsys, *words)
    assert len(list(Path("tuned/tuning").iterdir())) == 2
    found = [Run.open(path).experiment for path in Path("tuned").iterdir() if (path / "summary.json").exists()]
    assert sorted((e.algorithm.name, e.seed, e.lr, e.head_lr, e.relabel) for e in found) == [
        (name, seed, 0.1, 0.1, True) for name in ("deprl", "local") for seed in (1, 2)
    ]
    assert {Run.open(path).experiment.seed for path in Path("tuned/tuning").iterdir()} == {2}
    (header,) = (line for line in lines if line.startswith("validation accuracy"))
    assert header.split()[-5:] == ["1e-09", "0.5", "lr", "head", "lr"]
    assert "note: the best is the first or last rate tried; give --tune factors beyond it: DePRL; Local" in lines
    told = [line.partition("  ")[0] for line in lines if ": validation " in line]
    assert told == ["tuning on the first seed"] * 4 + ["best rates on the other seeds"] * 2
    before = _runs("tuned")
    again = _compare(capsys, *words)
    assert again[0] == "tuning on the first seed  4 of 4 runs finished before" and again[1] == ""
    quiet = _compare(capsys, *words, "--quiet")
    assert quiet == again[again.index(quiet[1]) - 1 :]
    assert _runs("tuned") == before
    # What was tried and not chosen is no part of what is reported.
    assert len(open_comparison(Path("tuned")).runs) == 4


@pytest.mark.usefixtures("undrawn")
def test_rates_that_fail_with_a_later_seed_lose(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = compare._run, []

    def failing(jobs: Sequence[Job], *rest: Any, **options: Any) -> dict[str, News]:
        asked.append([job.label for job in jobs])
        assert len(asked) <= 3, "they are not tried again and again"
        spoilt = {job.label: News(0, "failed", diverged=True) for job in jobs if "× 1, seed 2" in job.label}
        return run([job for job in jobs if job.label not in spoilt], *rest, **options) | spoilt

    monkeypatch.setattr(compare, "_run", failing)
    lines = _compare(capsys, "local", *SMALL, "--seeds", "1", "2", "--tune", "1e-9", "1", "--out", "tuned")
    best, other = "local, rates × 1, seed", "local, rates × 1e-09, seed"
    assert asked == [[f"{other} 1", f"{best} 1"], [f"{best} 2"], [f"{other} 2"]]
    (line,) = (line for line in lines if line.startswith("Local  ") and "failed" in line)
    assert line.split()[1].endswith("*") and line.split()[2:] == ["failed", "2e-10", "2e-10"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture) -> None:
    words = ["compare", "local", "d-psgd", *SMALL, "--lr", "1e30", "0.1", "--clip", "0", "--seeds", "1", "--out", "all"]
    assert main(words) == 2
    caught = capsys.readouterr()
    (line,) = caught.err.splitlines()
    assert line.startswith("manyheads: 2 failed: local, lr 1e+30; d-psgd, lr 1e+30. The first: the loss of worker ")
    assert "local, lr 1e+30: failed: the loss of worker" in caught.out
    assert len(list(Path("all").glob("*/summary.json"))) == 2
    assert "all/report.html" in caught.out

    assert main(["compare", "local", *SMALL, "--lr", "1e30", "--clip", "0", "--tune", "1", "2", "--out", "none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manyheads: 1 failed: local. The first: the loss of worker ")


def test_where_many_runs_fail_the_line_still_says_why(tmp_path: Path) -> None:
    failed = {f"deprl, graph ring, seed {seed}": News(seed, "failed", error="it broke.") for seed in range(100)}
    with pytest.raises(UserError) as error:
        compare._conclude(tmp_path, [], [], failed, quiet=True)
    named = "; ".join(list(failed)[:3])
    assert str(error.value) == f"100 failed: {named}; 97 more. The first: it broke."


@pytest.mark.usefixtures("undrawn")
def test_only_divergence_makes_a_rate_lose(capsys: pytest.CaptureFixture) -> None:
    words = ["compare", "local", *SMALL, "--seeds", "1", "--tune", "0.5", "1", "--out", "tuned"]
    assert main(words) == 0
    capsys.readouterr()
    (spoilt,) = Path("tuned/tuning").iterdir()
    (spoilt / "summary.json").unlink()
    (spoilt / "experiment.json").write_text("{")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manyheads: local, rates × ") and "is damaged" in line


@pytest.mark.usefixtures("undrawn")
def test_kill_and_continue(capsys: pytest.CaptureFixture) -> None:
    words = ["compare", "deprl", "d-psgd", "local", "--workers", "4", "--rounds", "12", "--seeds", "1", "--quiet"]
    words += ["--checkpoint-every", "1", "--threads", "2"]
    command = [sys.executable, "-m", "manyheads", *words, "--out", "killed"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(list(Path("killed").glob("*/checkpoint/round-*/manifest.json"))) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert len(list(Path("killed").glob("*/summary.json"))) < 3
    # Those that ran the jobs notice that nobody waits for them, and let the directories go.
    deadline = time.monotonic() + 20
    while main([*words, "--threads", "1", "--out", "killed"]) != 0:
        assert time.monotonic() < deadline
    assert main([*words, "--threads", "1", "--out", "whole"]) == 0
    capsys.readouterr()
    for path in Path("whole").glob("*/models.safetensors"):
        assert (Path("killed") / path.relative_to("whole")).read_bytes() == path.read_bytes()
    assert len(list(Path("killed").glob("*/summary.json"))) == 3


def test_a_file_that_starts_the_command_line_whenever_it_is_imported() -> None:
    Path("mine.py").write_text("import sys\nfrom manyheads.cli import main\nsys.exit(main())\n")
    words = ["compare", "deprl", "local", *SMALL, "--threads", "2", "--seeds", "1", "--out", "all", "--quiet"]
    done = subprocess.run([sys.executable, "mine.py", *words], capture_output=True, text=True, timeout=60, check=False)
    # Lines that two processes write at once may share one, and leave another empty.
    *said, end = filter(None, done.stderr.splitlines())
    assert said and all("write if __name__ == '__main__': above the call." in line for line in said)
    assert done.returncode == 2 and end.endswith("its process ended with status 2, as shown above.")


def test_a_folder_has_one_comparison_at_a_time(capsys: pytest.CaptureFixture) -> None:
    Path("all").mkdir()
    with locked(Path("all")):
        assert main(["compare", "local", *SMALL, "--out", "all"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "manyheads: another run is writing to all: wait for it, stop it, or choose another --out."
    assert [path.name for path in Path("all").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deprl"], "compare keeps its runs in a folder: give one with --out."),
        (["deprl", "--out", "file"], "file is a file: choose another --out."),
        (["deprl", "--out", "run"], "run holds a single run: choose another --out for many."),
        (["deprl", "--tune", "--validation", "0", "--out", "new"], "--tune chooses rates on the validation split"),
        (["deprl", "--tune", "0", "1", "--out", "new"], "--tune 0 1: give factors above 0"),
        (["deprl", "--rounds", "2", "3", "--out", "new"], "--rounds 2 and 3: give one number"),
        (["deprl", "--graph", "ring", "rong", "--out", "new"], "unknown graph 'rong'. Did you mean 'ring'?"),
        (["deprl", "--split", "iid", "nope:3", "--out", "new"], "unknown split"),
        (["deprl", "--model", "mlp:8", "nope", "--out", "new"], "unknown model 'nope'"),
        (["deprl", "--density", "0.5", "--out", "new"], "--density is an option of dispfl, not of deprl"),
        (["deprl", "dispfl", "--density", "0.5", "2", "--out", "new"], "--density 2.0 is outside (0, 1]"),
        (["deprl", "depr", "--out", "new"], "unknown algorithm 'depr'. Did you mean 'deprl'?"),
        (["deprl", "--preset", "paper", "--out", "new"], "unknown preset 'paper'."),
        (["deprl", "--seeds", "one", "--out", "new"], "--seeds: 'one' is not a whole number."),
        ([], "ALGORITHM not given: see manyheads compare --help."),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    Path("file").touch()
    Path("run").mkdir()
    Path("run/experiment.json").write_text(json.dumps({}))
    assert main(["compare", *words, "--workers", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"manyheads: {message}")
    assert sorted(path.name for path in Path().rglob("*")) == ["experiment.json", "file", "run"]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["deprl", "--seeds", "1,2,3"], "1 2 3"),
        (["deprl", "--seeds", "1,", "2"], "1"),
        (["deprl", "--tune", "0.5,1"], "0.5 1"),
        (["deprl", "--lr", "0.1,0.2"], "0.1 0.2"),
        (["deprl", "--relabel", "yes,no"], "yes no"),
        (["deprl,local"], "deprl local"),
    ],
)
def test_values_with_commas_between_them(words: list[str], values: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *words, "--out", "new"]) == 2
    assert capsys.readouterr().err.endswith(f". Separate values by spaces: {values}.\n")
    # One value is all that train takes.
    for single in (["train", "deprl,local"], ["train", "deprl", "--seed", "1,2"]):
        assert main(single) == 2
        assert "Separate" not in capsys.readouterr().err


@pytest.mark.usefixtures("without_pictures")
def test_a_report_is_not_replaced_by_one_without_its_runs(capsys: pytest.CaptureFixture) -> None:
    first = ["deprl", "local", *SMALL, "--seeds", "1", "--out", "all"]
    _compare(capsys, *first)
    page = Path("all/report.html").read_bytes()
    for fewer in (["deprl", *SMALL, "--seeds", "1"], ["deprl", "local", *SMALL, "--seeds", "2"]):
        assert main(["compare", *fewer, "--out", "all"]) == 2
        error = capsys.readouterr().err
        assert re.search("all holds a report on runs that are not asked for here, such as (deprl|local)-", error)
        assert len(error.splitlines()) == 1
    assert Path("all/report.html").read_bytes() == page
    # As a spreadsheet may save it.
    table = Path("all/csv/runs.csv")
    whole = table.read_bytes()
    for content in (b"\xff\xfe" + whole.decode().encode("utf-16-le"), b"folder\n" + b"x" * 200_000):
        table.write_bytes(content)
        assert main(["compare", *first]) == 2
        assert re.search(r"runs\.csv cannot be read \(.*\): put it back, or delete it", capsys.readouterr().err)
    table.write_bytes(whole)
    # With more seeds, algorithms or rounds it grows.
    _compare(capsys, "deprl", "local", "fedavg", *SMALL, "--rounds", "3", "--seeds", "1", "2", "--out", "all")
    assert Path("all/report.html").read_bytes() != page


@pytest.mark.usefixtures("without_pictures")
def test_a_run_that_looks_at_its_number_of_rounds_cannot_be_extended(capsys: pytest.CaptureFixture) -> None:
    """The folder would hold it twice, and no report could be about both."""
    words = ["deprl", "dispfl", *SMALL, "--seeds", "1", "--out", "all"]
    _compare(capsys, *words)
    _compare(capsys, *words)
    assert main(["compare", *words, "--rounds", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manyheads: all holds a report on dispfl-")
    assert "cannot be extended: give --rounds 2, or choose another --out" in line


@pytest.mark.usefixtures("without_pictures")
def test_runs_that_no_report_is_about_are_in_nobodys_way(capsys: pytest.CaptureFixture) -> None:
    """As one that failed: the command that wrote the report goes on to do so."""
    words = ["compare", "deprl", *SMALL, "--seeds", "1", "--clip", "0", "--out", "all", "--lr"]
    assert main([*words, "1e30"]) == 2
    for _ in range(2):
        assert main([*words, "0.1"]) == 0
    assert len(list(Path("all").glob("deprl-*"))) == 2
    assert main([*words, "0.2"]) == 2
    assert "holds a report on runs that are not asked for here" in capsys.readouterr().err


@pytest.mark.usefixtures("without_pictures")
def test_rates_that_were_tuned_may_change_and_the_report_with_them(capsys: pytest.CaptureFixture) -> None:
    words = ["deprl", *SMALL, "--seeds", "1", "--out", "all"]
    found = []
    for factor in ("1", "3"):
        _compare(capsys, *words, "--tune", factor)
        (run,) = Path("all").glob("deprl-*")
        found.append(Run.open(run).experiment.recipe.lr)
    assert found[1] == pytest.approx(3 * found[0])
