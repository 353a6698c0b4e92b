"""How a process asks the torchrun that started it not to start it again: by an empty file whose name both know."""

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


def give_up() -> None:
    """Ask not to be started again, where somebody may do so."""
    if name := os.environ.get(_NAME):
        with suppress(OSError):
            Path(name).touch()
