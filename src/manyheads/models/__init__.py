"""Nets as a representation and a head."""

from manyheads.models.registry import build
from manyheads.models.split import Split

__all__ = ["Split", "build"]
