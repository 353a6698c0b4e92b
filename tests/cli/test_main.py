"""The command line as a whole: help that is there at once, and mistakes that end in one line and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from manyheads import __version__, cli
from manyheads.cli import main

SMALL = ["--model", "mlp:16", "--workers", "4", "--rounds", "1", "--quiet"]


def _fails(capsys: pytest.CaptureFixture, *words: str, status: int = 2) -> str:
    """The one line that a command ends in."""
    assert main(words) == status
    caught = capsys.readouterr()
    (line,) = caught.err.splitlines()
    assert line.startswith("manyheads: ")
    assert "Traceback" not in caught.out
    return line


def test_help_and_version(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"manyheads {__version__}\n"
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == overview
    for command in ("train", "inspect", "export", "predict"):
        assert f"    {command} " in overview
        assert main([command, "--help"]) == 0
        assert f"manyheads {command}" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    page = capsys.readouterr().out
    for part in (
        "who holds what:",
        "the algorithm's own:",
        "--head-epochs N",
        "[deprl, fedrep: 2]",
        "5 %",
        "examples:",
    ):
        assert part in page


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    looks = [["inspect", what] for what in ("", "graph", "data", "speed", "memory", "run", "constants")]
    words = ["", "train", "compare", "join", "report", "study", "export", "predict"]
    for command in [*([word] for word in words), *looks]:
        assert main([*filter(None, command), "--help"]) == 0
        for line in capsys.readouterr().out.splitlines():
            # What an option takes is never broken.
            assert len(line) <= width or line.startswith("  --"), (command, line)


def test_what_needs_no_experiment_does_not_wait_for_torch() -> None:
    """The lists of commands, and the pages and mistakes of commands without an experiment's options."""
    pages = [["--help"], ["inspect", "--help"], *([word, "--help"] for word in ("report", "export", "predict"))]
    calls = [*pages, ["inspect", "run", "--help"], ["report", "runs", "--nonsense"], ["trian"]]
    code = (
        f"import sys; from manyheads.cli import main; print([main(words) for words in {calls}]); "
        "sys.exit([m for m in ('torch', 'numpy', 'matplotlib', 'rich', 'networkx') if m in sys.modules] or None)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[0, 0, 0, 0, 0, 0, 2, 2]\n")
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["inspect", "grap"], "unknown command 'grap'. Did you mean 'graph'?"),
        (["--verson"], "unknown option --verson. Did you mean --version?"),
        (["--rounds", "3", "train", "deprl"], "unknown option --rounds. See manyheads --help."),
        (["--rounds=3", "train", "deprl"], "unknown option --rounds. See manyheads --help."),
        (["train", "deprl", "--quiet=yes"], "--quiet: takes no value, given 'yes'"),
        (["train"], "no algorithm given"),
        (["train", "deprl", "extra"], "unexpected word 'extra': see manyheads train --help."),
        (["inspect", "graph", "--xyzzy"], "unknown option --xyzzy. See manyheads inspect graph --help."),
        (["join", "run", "--rounds", "3"], "unknown option --rounds. See manyheads join --help."),
        (["inspect", "memory", "deprl", "--site-timeout", "1"], "unknown option --site-timeout."),
        (["compare", "deprl", "--seed", "1", "--out", "all"], "unknown option --seed. Did you mean --seeds?"),
        (["compare", "deprl", "--data", "s-{worker}.npz", "--out", "all"], "give one file for all, or train each"),
        (["inspect", "data", "--data", "s-{worker}.npz"], "a file for each worker, which only manyheads train can use"),
        (
            ["train", "deprl", "--data", ".", *SMALL],
            ". is a folder: give the path of an npz file. The user guide shows how to make one from CSV",
        ),
        (["train", "deprll"], "Did you mean 'deprl'?"),
        (["train", "deprl", "--grph", "ring"], "unknown option --grph. Did you mean --graph?"),
        (["train", "deprl", "--data", "digit", *SMALL], "Did you mean 'digits'?"),
        (["train", "deprl", "--data", "no.npz", *SMALL], "no file no.npz"),
        (["train", "deprl", "--graph", "rnig", *SMALL], "Did you mean 'ring'?"),
        (["train", "deprl", "--graph", "random:0.0001", *SMALL], "gave no connected graph"),
        (["train", "deprl", "--graph", "random:2", *SMALL], "a probability"),
        (["train", "deprl", "--graph", "links:0-1=1", "--workers", "2"], "can never agree: give links whose weights"),
        (["train", "deprl", "--split", "dirichlett:1", *SMALL], "Did you mean"),
        (["train", "deprl", "--workers", "0"], "--workers 0 is not positive"),
        (["train", "deprl", "--workers", "5000", "--rounds", "1"], "5000"),
        (["train", "deprl", "--lr", "-1"], "--lr -1.0 is not positive"),
        (["train", "deprl", "--validation", "1.5"], "--validation 1.5 is outside"),
        (["train", "deprl", "--head", "nowhere", *SMALL], "nowhere"),
        (["train", "deprl", *SMALL, "--model", "mpl"], "Did you mean 'mlp'?"),
        (["train", "deprl", *SMALL, "--model", "no.such:thing"], "cannot import"),
        (["train", "deprl", "--device", "gpu", *SMALL], "unknown device 'gpu'"),
        (["train", "deprl", "--engine", "warp", *SMALL], "warp"),
        (["train", "deprl", "--resume", "--out", "absent", *SMALL], "--resume: there is no absent"),
        (["train", "deprl", "--out", "/proc/no", *SMALL], "/proc/no"),
        (["train", "deprl", "--lr", "1e30", "--clip", "0", "--out", "broken", *SMALL], "is not a number in round 1"),
        (["train", "--from", "absent.json"], "--from absent.json: No such file or directory: give a run's directory,"),
        (["inspect", "graph", "--workers", "1"], "at least 2 workers"),
        (["inspect", "graph", "--workers", "4", "--out", "graph.gif"], "graph.gif"),
        (["inspect", "graph", "--workers", "4", "--out", "/proc/graph.png"], "/proc/graph.png"),
        (["inspect", "data", "--split", "shards:0"], "shards"),
        (["inspect", "run", "."], "not a run directory"),
        (["inspect", "run"], "RUN not given: see manyheads inspect run --help."),
        (["export", ".", "--worker", "0", "--out", "x.safetensors"], "not a run directory"),
        (["export", "."], "--worker, --out not given: see manyheads export --help."),
        (["predict", ".", "--worker", "0", "--data", "x.npz"], "not a run directory"),
    ],
)  # fmt: skip
def test_mistakes(
    words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in _fails(capsys, *words)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept <= {"broken"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": {"name": "deprl"}, "wrokers": 3}', "\0", "null"])
def test_a_file_that_is_no_experiment(text: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(text)
    assert _fails(capsys, "train", "--from", str(path)).startswith(f"manyheads: --from {path}: ")


def test_from_a_file_that_is_no_text(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    np.savez(tmp_path / "my.npz", x=np.ones(300))
    line = _fails(capsys, "train", "--from", str(tmp_path / "my.npz"))
    assert line.endswith("my.npz is not a text file: give an experiment.json that manyheads wrote.")


def test_a_foreign_folder_is_left_alone(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "not empty" in _fails(capsys, "train", "deprl", "--out", str(tmp_path), *SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert "is a file" in _fails(capsys, "train", "deprl", "--out", str(tmp_path / "thesis.tex"), *SMALL)


def test_a_command_that_a_notebook_starts_draws_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyheads", "inspect", "graph", "--out", "graph.svg"]
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **backend}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "graph.svg").exists()


def test_arrays_that_are_no_arrays(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not a zip file")
    np.savez(tmp_path / "nan.npz", x=np.full((20, 3), np.nan), y=np.zeros(20, int))
    for name in ("text.npz", "nan.npz"):
        assert name in _fails(capsys, "train", "deprl", "--data", str(tmp_path / name), *SMALL)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), 2, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto allocate"), 2, "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), 2, "not enough memory"),
        (OSError(28, "No space left on device", "/full/disk"), 2, "/full/disk: No space left on device."),
        (OSError("odd"), 2, "odd"),
        (KeyboardInterrupt(), 130, "stopped."),
        (KeyboardInterrupt("stopped at round 12; the same command continues it."), 130, "stopped at round 12"),
    ],
)
def test_what_goes_wrong_outside(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args) -> None:
        raise error

    monkeypatch.setattr(cli.train, "run", run)
    assert said in _fails(capsys, "train", "deprl", status=status)


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.train, "run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "deprl"])


def test_a_reader_that_leaves() -> None:
    code = (
        "import sys; from manyheads import cli; from manyheads.cli import inspect_run; "
        "inspect_run.run = lambda args: print('nobody reads this'); "
        "sys.exit(cli.main(['inspect', 'run', '.']))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, b"")


def test_nowhere_to_print_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it when the standard output is closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["study", "--list"]) == 0
    sys.stdout.close()
