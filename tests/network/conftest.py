"""Processes for tests: forked from one that has imported everything, so that starting one costs next to nothing."""

import itertools
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

import pytest

_CHILD = """\
import atexit, os, runpy, sys
os.environ.update(env)
os.chdir(cwd)
log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(log, 1)
os.dup2(log, 2)
sys.argv[1:] = words
try:
    runpy.run_path(script, run_name="__main__")
finally:
    atexit._run_exitfuncs()  # multiprocessing ends a process without
"""


@dataclass(frozen=True)
class Started:
    """One process that was started."""

    process: BaseProcess
    output: Path

    def status(self, timeout: float = 240) -> int | None:
        """Its exit status, when it has ended; None: it has not."""
        self.process.join(timeout)
        return self.process.exitcode

    def text(self) -> str:
        return self.output.read_text()


Start = Callable[..., Started]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a script in a process of its own: ``start(script, *words, cwd=..., **environment)``."""
    folder = tmp_path_factory.mktemp("processes")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "manyheads.cli.options", "manyheads.rounds"])
    number = itertools.count()
    child = folder / "child.py"
    child.write_text(_CHILD)
    with ExitStack() as stack, _surroundings():

        def begin(script: str | Path, *words: object, cwd: Path = folder, **environment: object) -> Started:
            output = folder / f"output-{next(number)}"
            given = {
                "env": {
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),
                    **{name: str(value) for name, value in environment.items()},
                },
                "cwd": str(cwd),
                "output": str(output),
                "words": [str(word) for word in words],
                "script": str(script),
            }
            process = context.Process(target=runpy.run_path, args=(str(child), given))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            return Started(process, output)

        yield begin


@contextmanager
def _surroundings() -> Iterator[None]:
    """What tests can import, the forked processes can; and their torch is as quiet as the command line has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="session")
def start_together(start: Start) -> Callable[..., list[Started]]:
    """Start a script in several processes that find each other as torchrun would have them do."""

    def begin(
        count: int,
        script: str | Path,
        *words: object,
        own: Mapping[int, Sequence[object]] = MappingProxyType({}),
        folders: Sequence[Path] | None = None,
        ranks: Sequence[int] | None = None,
        machines: Sequence[int] | None = None,
    ) -> list[Started]:
        """``own``: words that only a certain rank gets; ``folders``: where each stands; ``ranks``: only these come;
        ``machines``: on which each is, as torchrun counts them."""
        meeting = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

        def surroundings(rank: int) -> dict[str, object]:
            given: dict[str, object] = {"RANK": rank, **meeting}
            if folders is not None:
                given["cwd"] = folders[rank]
            if machines is not None:
                given |= {"GROUP_RANK": machines[rank], "LOCAL_RANK": machines[:rank].count(machines[rank])}
            return given

        return [
            start(script, *words, *own.get(rank, ()), **surroundings(rank))
            for rank in (range(count) if ranks is None else ranks)
        ]

    return begin


def free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return end.getsockname()[1]
