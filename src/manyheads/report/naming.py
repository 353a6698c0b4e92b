"""What options, their values and the files about them are called in a report."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

from manyheads.topology import brief

_LONGEST_SLUG = 80
"""A file's name joins two of them with a few words, and a file system takes 255 letters."""


def words(name: str) -> str:
    """A field's name as a person says it."""
    return name.replace("_", " ")


def shown(value: Any) -> str:
    """An option's value for people: words and numbers as they are, objects by their kind."""
    if isinstance(value, dict):
        return " ".join(dict.fromkeys(str(value[part]) for part in ("kind", "name") if part in value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "default" if value is None else brief(str(value))


def slugs(labels: Iterable[str]) -> list[str]:
    """Labels turned into file names, all different."""
    found: list[str] = []
    for label in labels:
        name = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:_LONGEST_SLUG].rstrip("-.") or "x"
        numbered = (f"{name}-{number}" for number in itertools.count(len(found) + 1))
        found.append(next(slug for slug in itertools.chain([name], numbered) if slug not in found))
    return found
