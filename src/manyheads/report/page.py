"""The HTML page, and the files beside it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import manyheads
from manyheads.errors import UserError
from manyheads.files import disk_errors, replacing
from manyheads.report import findings, mixing, options, rates, table
from manyheads.report.chapters import Chapter, of_setting, of_systems
from manyheads.report.comparison import Comparison
from manyheads.report.latex import tabular
from manyheads.report.naming import shown, words
from manyheads.report.spreadsheets import csv_files

NAME = "report.html"


@dataclass(frozen=True)
class Part:
    """One point of the grid: what came out there, and its chapters."""

    title: str
    outcome: str
    chapters: list[Chapter]


def write(comparison: Comparison) -> Path:
    """Write ``report.html``, ``figures/`` and ``csv/`` into the comparison's folder; gives the page.

    Nothing is written before all of it is made.
    """
    page_path = comparison.folder / NAME
    earlier = _files_of_earlier(page_path)
    parts = [
        Part(str(setting), findings.outcome(comparison, j), of_setting(comparison, j))
        for j, setting in enumerate(comparison.settings)
    ]
    by_system = of_systems(comparison)
    tables = [("comparison.tex", tabular(comparison)), *csv_files(comparison)]
    files = {f"csv/{name}": text.encode() for name, text in tables}
    chapters = [*(chapter for part in parts for chapter in part.chapters), *by_system]
    pictures = [picture for chapter in chapters for _, row in chapter.rows for picture in row]
    page = _render(comparison, parts, by_system, list(files), {f"csv/{picture.name}.csv" for picture in pictures})
    for picture in pictures:
        files[f"figures/{picture.name}.svg"] = picture.svg
        files[f"figures/{picture.name}.png"] = picture.png
        files[f"figures/{picture.name}.pdf"] = picture.pdf()
    for name, content in {**files, NAME: page.encode()}.items():
        path = comparison.folder / name
        # It belongs to the runs that it is about: nobody can ask for another place.
        with disk_errors(path, "report on a copy of the folder"):
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                file.write(content)
    for name in earlier - files.keys():
        # Beside this report it would be taken for one of its own.
        with disk_errors(page_path, "report on a copy of the folder"):
            (comparison.folder / name).unlink(missing_ok=True)
    return page_path


def _files_of_earlier(page: Path) -> set[str]:
    """The pictures and tables that an earlier report leads to; a page of somebody else's is not overwritten."""
    if not page.exists():
        return set()
    text = page.read_text(encoding="utf-8", errors="replace")
    if '<meta name="generator" content="manyheads ' not in text:
        raise UserError(f"{page} is no report of manyheads and would be overwritten: move it away.")
    return set(re.findall(r'href="((?:figures|csv)/[\w.-]+)"', text))


def _render(
    comparison: Comparison, parts: list[Part], by_system: list[Chapter], csv_names: list[str], beside_pictures: set[str]
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("manyheads.report")
    # Whatever comes from a file of a run is escaped; only the package's own style, script and pictures are not.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    summaries, tried = [run.summary for run in comparison.runs], rates.tried(comparison)
    return template.render(
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        script=Markup((folder / "page.js").read_text(encoding="utf-8")),
        safe=Markup,
        words=words,
        comparison=comparison,
        title=findings.title(comparison),
        conditions=findings.conditions(comparison),
        verdict=findings.verdict(comparison),
        several=len(comparison.systems) > 1,
        caveats=findings.caveats(comparison),
        headers=table.headers(comparison),
        rows=table.rows(comparison),
        meanings=[column for column in table.COLUMNS if column.meaning],
        mixings=mixing.rows(comparison),
        parts=parts,
        by_system=by_system,
        shared=options.shared_options(comparison),
        own=[(system.label, options.own_options(system)) for system in comparison.systems],
        varying={
            "Options that follow from the data set": options.options_by_data(comparison),
            "Rates chosen for each algorithm separately": options.options_apart(comparison),
        },
        tried=tried,
        ends=rates.chosen_at_edge(tried),
        notes=_distinct(note for summary in summaries for note in summary.get("notes", [])),
        runtimes=_distinct(map(_runtime, summaries)),
        csv_names=csv_names,
        beside_pictures=beside_pictures,
        version=manyheads.__version__,
    )


def _runtime(summary: Mapping[str, Any]) -> str:
    """Where a run was computed, in a line."""
    return ", ".join(f"{words(name)} {shown(value)}" for name, value in summary.get("runtime", {}).items())


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
