"""Whether torchrun restarts a process, and how the process asks it not to: by an empty file that both know of."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

_NAME = "MANYHEADS_GAVE_UP"
_MEETINGS = "MANYHEADS_MEETINGS"


def announce() -> Path:
    """Choose the file by which processes that are started from now on will ask not to be restarted."""
    path = Path(gettempdir(), f"manyheads-{secrets.token_hex(8)}")
    os.environ[_NAME] = str(path)
    os.environ[_MEETINGS] = "0"
    return path


def met() -> None:
    """Tell the processes that are started from now on that machines have met once more."""
    os.environ[_MEETINGS] = str(_number(_MEETINGS) + 1)


def how_it_goes_on() -> str:
    """What becomes of a run that has lost a process, in a sentence."""
    if _count("RESTART_COUNT") < _count("MAX_RESTARTS"):
        return "torchrun starts the run again within about half a minute, unless the machine is lost where all meet."
    return "The same command continues the run."


def restarted() -> bool:
    """Whether torchrun has restarted this process, so that it took part before."""
    # It does not count the restarts in which machines come or go.
    return _count("RESTART_COUNT") > 0 or _number(_MEETINGS) > 1


def give_up() -> None:
    """Ask not to be restarted, if this was started where that can be asked."""
    if name := os.environ.get(_NAME):
        with suppress(OSError):
            Path(name).touch()


def _count(name: str) -> int:
    """A number that torchrun tells its processes; 0 without torchrun."""
    return _number(f"TORCHELASTIC_{name}")


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))
