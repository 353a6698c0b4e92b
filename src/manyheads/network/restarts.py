"""Whether torchrun starts a process again, and how the process asks it not to: by an empty file that both know."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

_NAME = "MANYHEADS_GAVE_UP"


def announce() -> Path:
    """The file that processes started from here on will leave."""
    path = Path(gettempdir(), f"manyheads-{secrets.token_hex(8)}")
    os.environ[_NAME] = str(path)
    return path


def how_it_goes_on() -> str:
    """What becomes of a run that has lost a process, in a sentence."""
    if _count("RESTART_COUNT") < _count("MAX_RESTARTS"):
        return "torchrun starts the run again within about half a minute, with whoever is there then."
    return "The same command continues the run."


def restarted() -> bool:
    """Whether torchrun has started this process again: what went wrong, it was there."""
    return _count("RESTART_COUNT") > 0


def give_up() -> None:
    """Ask not to be started again, where somebody may do so."""
    if name := os.environ.get(_NAME):
        with suppress(OSError):
            Path(name).touch()


def _count(name: str) -> int:
    """What torchrun tells a process of its restarts; 0: it does not."""
    return int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
