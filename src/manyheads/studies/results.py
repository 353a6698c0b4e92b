"""What a study has to report on: its trials, those of them that are recorded, and the files it writes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from manyheads.drawing import Picture
from manyheads.files import make_folder, write_atomically
from manyheads.report.collect import Finished
from manyheads.report.numbers import Stat, at_end, majority_floor, shared_seeds
from manyheads.report.spreadsheets import csv_text
from manyheads.studies.published import REPLACED, STAND_IN
from manyheads.studies.records import Records
from manyheads.studies.trial import Trial
from manyheads.units import counted, human_seconds

NOTHING = "–"
BANDS = "Bands in a picture are the deviation over seeds."


@dataclass
class Report:
    """A study's outcome: a page in Markdown, and the files beside it."""

    name: str
    """The study's."""
    title: str
    parts: list[str] = field(default_factory=list)
    """Paragraphs and tables."""
    files: dict[str, bytes] = field(default_factory=dict)
    """File name -> content."""

    def add_table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table in the page."""
        lines = [header, ["---"] * len(header), *rows]
        self.parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))

    def add_csv(self, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Numbers to compute with."""
        short = ([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
        self.files[f"{self.name}.csv"] = csv_text(header, short).encode()

    def add_picture(self, picture: Picture) -> None:
        """A picture in the page."""
        name = f"{self.name}-{picture.name}"
        self.files.update({f"{name}.svg": picture.svg, f"{name}.png": picture.png})
        self.parts.append(f"![{picture.alt}]({name}.svg)")

    def write(self, folder: Path) -> Path:
        """Write ``NAME.md`` and the files beside it; gives the page."""
        page = folder / f"{self.name}.md"
        make_folder(folder)
        for name, content in self.files.items():
            write_atomically(folder / name, content)
        write_atomically(page, ("\n\n".join([f"# {self.title}", *self.parts]) + "\n").encode())
        return page


class Results:
    """The recorded runs of a study, found by their places."""

    def __init__(self, trials: Sequence[Trial], records: Records) -> None:
        self.trials = trials
        self._records = records

    @cached_property
    def recorded(self) -> list[tuple[Trial, Finished]]:
        pairs = ((trial, self._records.read(trial)) for trial in self.trials)
        return [(trial, run) for trial, run in pairs if run is not None]

    def runs(self, **place: Any) -> list[Finished]:
        """The runs at a place, one for each seed."""
        return [run for trial, run in self.recorded if place.items() <= trial.place.items()]

    def alike(self, key: str, **place: Any) -> dict[Any, list[Finished]]:
        """The recorded runs at a place, by the values of ``key``; only the seeds that all of these values have."""
        there = {value: runs for value in self.values(key) if (runs := self.runs(**{key: value}, **place))}
        return dict(zip(there, shared_seeds(there.values()), strict=True))

    def stat(self, metric: str, **place: Any) -> Stat | None:
        """A metric after the last round, over seeds; None: no such run is recorded."""
        return at_end(self.runs(**place), metric)

    def floor(self, **place: Any) -> Stat | None:
        """What naming each worker's most frequent class scores at a place."""
        return majority_floor(self.runs(**place))

    def values(self, key: str) -> list[Any]:
        """The different values of a part of the place, in the grid's order."""
        return list(dict.fromkeys(trial.place[key] for trial in self.trials if key in trial.place))

    def about(self, *, deviations: bool) -> str:
        """A paragraph on what was run, where, and how long it took; and what ± means, if the page has deviations."""
        runs = [run for _, run in self.recorded]
        said = [f"{len(runs)} of {counted(len(self.trials), 'run')} {'is' if len(runs) == 1 else 'are'} recorded."]
        if runs:
            machines = sorted({_machine(run) for run in runs})
            seconds = sum(run.summary["seconds"] for run in runs)
            said.append(f"Computed on {'; '.join(machines)}: {human_seconds(seconds)} in all.")
            if deviations:
                said.append(
                    "± is the deviation over seeds, with their number in brackets; cells without it have one seed."
                )
        if any(trial.data in REPLACED for trial in self.trials):
            said.append(STAND_IN)
        return " ".join(said)


def percent(stat: Stat | None) -> str:
    """An accuracy over seeds, in percent, with its deviation and the number of seeds."""
    return over_seeds(stat, 100)


def over_seeds(stat: Stat | None, factor: float = 1.0) -> str:
    """A number over seeds, times a factor, with its deviation and the number of seeds."""
    if stat is None:
        return NOTHING
    deviation = f" ± {factor * stat.deviation:.1f} ({stat.count})" if stat.deviation is not None else ""
    return f"{factor * stat.mean:.1f}{deviation}"


def in_percent(stat: Stat | None) -> tuple[float | None, float | None]:
    """Mean and deviation of an accuracy over seeds, as numbers in percent."""
    if stat is None:
        return None, None
    return 100 * stat.mean, None if stat.deviation is None else 100 * stat.deviation


def beside(stat: Stat | None, paper: float) -> str:
    """The paper's accuracy in percent, and how far ours is from it."""
    return f"{paper:.1f}" + ("" if stat is None else f", {points(100 * stat.mean - paper)}")


def points(value: float) -> str:
    """A difference in points of a percentage, with its sign."""
    # Adding zero turns what rounds to -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


def _machine(run: Finished) -> str:
    runtime = run.summary.get("runtime", {})
    device, torch = runtime.get("device", "an unknown device"), runtime.get("torch", "?")
    return f"{device} ({run.options.get('precision')}, engine {runtime.get('engine', '?')}, torch {torch})"
