"""The run directory: what a run leaves on disk, written as it goes and read back when it is used."""

from manyheads.store.reader import Run
from manyheads.store.writer import RunDirectory

__all__ = ["Run", "RunDirectory"]
