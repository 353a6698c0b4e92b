"""Sizes, times, numbers, their deviations and what they count, as people read them."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import floor, log10

_NUMBER = re.compile(r"(?P<digits>-?\d+\.?(?P<decimals>\d*))(?P<power>(e[+-]\d+)?)(?P<unit>( .+)?)")

_FEW = 3
"""Names, or consecutive numbers, that are given one by one."""
_MOST_DECIMALS, _LARGEST_WHOLE = 6, 1e6
"""Of numbers that are written without a power of ten."""
_MOST_STRETCHES = 20
"""More would push what to do out of a message's one line."""


def human_bytes(count: float) -> str:
    """``12.3 MB``; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3:20 min``, ``2:05 h``, ``2.5 days``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{seconds / 86400:.1f} days"


def plural(noun: str, count: float) -> str:
    """What so many are called: ``round`` of 1, ``rounds`` of others."""
    return noun if count == 1 else noun + ("es" if noun.endswith(("s", "ch")) else "s")


def counted(count: int, noun: str) -> str:
    """So many of them: ``1 round``, ``2 rounds``."""
    return f"{count} {plural(noun, count)}"


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first few of some names, and how many more there are: ``a, b, c, 2 more``."""
    more = [f"{len(names) - _FEW} more"] if len(names) > _FEW else []
    return between.join([*names[:_FEW], *more])


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Things by their numbers, ascending: ``worker 3``, ``workers 0, 1``, ``workers 0 to 9, 12``."""
    stretches: list[list[int]] = []
    for _, found in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        stretch = [number for _, number in found]
        stretches += [[number] for number in stretch] if len(stretch) <= _FEW else [stretch]
    named = [" to ".join(map(str, dict.fromkeys((each[0], each[-1])))) for each in stretches[:_MOST_STRETCHES]]
    left = sum(map(len, stretches[_MOST_STRETCHES:]))
    more = [f"{left} more"] if left else []
    return f"{plural(noun, len(numbers))} {', '.join([*named, *more])}"


def short(value: float, digits: int = 3) -> str:
    """A number of whatever size in so many digits: ``0.0559``, ``12.0``, ``1.98e-06``."""
    return f"{value:#.{digits}g}".removesuffix(".") if value else "0"


def alike(values: Iterable[float]) -> Callable[[float], str]:
    """How the numbers of a column read: with as many decimals as the smallest needs for three digits.

    If they would become too long, each reads as ``short`` shows it.
    """
    sizes = [abs(value) for value in values if value]
    decimals = max(0, 2 - floor(log10(min(sizes, default=1))))
    if decimals > _MOST_DECIMALS or max(sizes, default=1) >= _LARGEST_WHOLE:
        return short
    return lambda value: f"{value:z.{decimals}f}"


def plus_minus(mean: float, deviation: float | None, show: Callable[[float], str]) -> str:
    """A mean and its deviation, if there is one, as a function shows numbers: ``0.0559 ± 0.0004``, ``1.3 ± 0.8 s``."""
    shown = show(mean)
    if deviation is None:
        return shown
    spread, (number, _, unit) = no_finer(show(deviation), shown), shown.partition(" ")
    return f"{number if unit and spread.endswith(f' {unit}') else shown} ± {spread}"


def no_finer(deviation: str, mean: str) -> str:
    """A deviation with no more decimals than its mean, both as shown: ``0.000437`` beside ``0.0559`` is ``0.0004``.

    One in another unit stays as it is, and so does one that would only become longer, as it is far above its mean.
    """
    ours, theirs = _NUMBER.fullmatch(deviation), _NUMBER.fullmatch(mean)
    if ours is None or theirs is None or ours["unit"] != theirs["unit"]:
        return deviation
    scaled = float(ours["digits"] + ours["power"]) / float(f"1{theirs['power']}")
    rounded = f"{scaled:.{len(theirs['decimals'])}f}{theirs['power']}{theirs['unit']}"
    return min(rounded, deviation, key=len)
