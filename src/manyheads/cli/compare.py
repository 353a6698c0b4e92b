"""``manyheads compare``: several algorithms, options and seeds on the same data, side by side, and who is ahead."""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.parser import Commands, Parser, number
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.experiment import Runtime
    from manyheads.jobs import Job, News
    from manyheads.report import Comparison
    from manyheads.tune import Tuning

_RUNTIME = (
    "data_dir",
    "device",
    "engine",
    "threads",
    "eval_every",
    "theory_every",
    "checkpoint_every",
    "deterministic",
)
"""Fields of Runtime that are options here; a comparison runs in one process and always continues."""

_EXAMPLES = """\
examples:
  manyheads compare deprl d-psgd local --workers 32 --out runs/three
  manyheads compare deprl fedrep --graph ring full --split iid dirichlet:0.3 \\
    --out runs/grid
  manyheads compare deprl d-psgd --relabel --tune --out runs/tuned

Any option may take several values: every combination is run with every seed. Algorithms that do not have
an option ignore it. A comparison that was stopped or killed is continued by the same command, which does only what is
missing.
"""

_HEADER_WIDTH = 10
"""Letters in a line of a column's title."""


def add(commands: Commands) -> None:
    commands.add_parser(
        "compare",
        help="run several algorithms, options and seeds side by side",
        usage="manyheads compare ALGORITHM... [options] --out DIR",
        description="Run several algorithms, options and seeds side by side, over the cores, and report on them.",
        epilog=_EXAMPLES,
        fill=_add_options,
        run=run,
    )


def _add_options(parser: Parser) -> None:
    from manyheads.cli.options import add_options, options_of
    from manyheads.compare import SEEDS
    from manyheads.experiment import Experiment
    from manyheads.tune import FACTORS

    parser.add_argument(
        "--seeds",
        dest="seed",
        nargs="+",
        type=options_of(Experiment)["seed"].read,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"the seeds to average over (which, not how many) [{' '.join(map(str, SEEDS))}]",
    )
    parser.add_argument(
        "--tune",
        nargs="*",
        type=number,
        metavar="FACTOR",
        help="tune each algorithm's rates on the validation split, trying these multiples of them"
        f" [{' '.join(f'{factor:g}' for factor in FACTORS)}]",
    )
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    parser.add_argument("--out", type=Path, metavar="DIR", default=argparse.SUPPRESS, help="folder for all runs")
    add_options(parser, several=True, runtime=_RUNTIME)


def run(args: argparse.Namespace) -> None:
    from manyheads.cli.options import experiments, given
    from manyheads.cli.terminal import waiting
    from manyheads.compare import SEEDS, distinct, plan
    from manyheads.experiment import Runtime
    from manyheads.files import locked
    from manyheads.tune import FACTORS, choose, tunings, with_rates

    runtime = Runtime(**given(args, Runtime))
    folder = runtime.out
    if folder is None:
        raise UserError("compare keeps its runs in a folder: give one with --out.")
    if "seed" not in args:
        args.seed = list(SEEDS)
    asked = experiments(args)
    with waiting("loading the data", quiet=args.quiet):
        wanted = distinct(asked, runtime, tuned=args.tune is not None)
    jobs = plan(wanted, folder)
    tuned = [] if args.tune is None else tunings(wanted, args.tune or FACTORS, folder)
    with locked(folder):
        _refuse_another(folder, jobs, tuned=bool(tuned))
        if tuned:
            failed = choose(tuned, lambda jobs: _run(jobs, runtime, "tuning", validation=True, quiet=args.quiet))
            # Nothing is left to run: the chosen rates have been run with every seed.
            jobs = plan(with_rates(wanted, tuned), folder)
        else:
            failed = _run(jobs, runtime, "running", quiet=args.quiet)
        _conclude(folder, jobs, tuned, failed, quiet=args.quiet)


def _refuse_another(folder: Path, jobs: "Sequence[Job]", *, tuned: bool) -> None:
    """Refuse a folder whose report is also about runs that are not asked for now: the new one would lack them."""
    from manyheads.experiment import flat
    from manyheads.report.spreadsheets import reported
    from manyheads.store.layout import EXPERIMENT, read_description

    # A run may be extended to more rounds, and tuning may choose other rates.
    free = {"rounds", "lr", "head_lr"} if tuned else {"rounds"}

    def key(description: Mapping[str, Any]) -> str:
        return json.dumps({name: it for name, it in flat(description).items() if name not in free}, sort_keys=True)

    asked = {key(job.experiment.describe()) for job in jobs}
    for run in reported(folder):
        path = folder / run / EXPERIMENT
        if path.exists() and key(read_description(path)) not in asked:
            raise UserError(
                f"{folder} holds a report on runs that are not asked for here, such as {run}: ask for them too, or"
                " choose another --out."
            )


def _conclude(
    folder: Path, jobs: "Sequence[Job]", tuned: "Sequence[Tuning]", failed: "Mapping[str, News]", *, quiet: bool
) -> None:
    """Write the report, print the tables, and say what failed."""
    from manyheads.cli.terminal import waiting
    from manyheads.cli.text import columns
    from manyheads.report import write

    try:
        comparison = _compared(folder, jobs)
        with waiting("drawing the report", quiet=quiet):
            page = write(comparison)
    except UserError:
        # Without the failed runs the grid may be incomplete: then the failure is what to report.
        if not failed:
            raise
    else:
        print()
        print(*tuning_tables(tuned, comparison), result_table(comparison, columns()), page, sep="\n\n")
    if failed:
        reason = next(iter(failed.values())).error
        raise UserError(f"{len(failed)} failed: {'; '.join(failed)}. The first: {reason}")


def _run(
    jobs: "Sequence[Job]", runtime: "Runtime", title: str, *, validation: bool = False, quiet: bool
) -> "dict[str, News]":
    """Run jobs and show it; those that failed, by label."""
    from manyheads.cli.board import Shown, follow
    from manyheads.jobs import run_jobs

    shown = [Shown(job.label, job.rounds) for job in jobs]
    finished = sum(job.finished for job in jobs)
    with closing(run_jobs(jobs, runtime)) as news:
        return follow(news, shown, title, finished=finished, validation=validation, quiet=quiet)


def _compared(folder: Path, jobs: "Sequence[Job]") -> "Comparison":
    """These runs, and no others that the folder may hold."""
    from manyheads.report.collect import find_runs
    from manyheads.report.comparison import compare

    found, paths = find_runs(folder), {job.path for job in jobs}
    runs = [run for run in found.runs if run.path in paths]
    if not runs:
        raise UserError("no run is finished.")
    return compare(replace(found, runs=runs))


def result_table(comparison: "Comparison", width: int = sys.maxsize) -> str:
    """A row for each system and setting: means over seeds with their deviation, the best marked; and who is ahead.

    The last columns are left out if the table is wider than ``width`` letters.
    """
    from manyheads.cli.text import table
    from manyheads.report.comparison import words
    from manyheads.report.findings import caveats, verdict
    from manyheads.report.table import headers, rows

    titles, named = ["", *map(words, comparison.grid), *headers(comparison)], 1 + len(comparison.grid)
    body = []
    for row in rows(comparison):
        if row.begins:
            body.append([""] * len(titles))
        body.append([row.label, *row.setting, *(cell.text + ("*" if cell.best else " ") for cell in row.cells)])
    count, text = len(titles), table(_wrapped(titles), body, named)
    while max(map(len, text.splitlines())) > width and count > named + 1:
        count -= 1
        text = table(_wrapped(titles[:count]), [row[:count] for row in body], named)
    several = len(comparison.systems) > 1
    marks = ["* best"] if several else []
    if len(comparison.seeds) == 1:
        (seed,) = comparison.seeds
        two = " ".join(map(str, sorted({seed, 2 if seed == 1 else 1})))
        marks.append(f"one seed ({seed}), so no deviation; compare --seeds {two} runs two")
    else:
        error = " (behind the best: standard error)" if several else ""
        marks.append(f"± deviation over {len(comparison.seeds)} seeds{error}")
    lines = [text, "; ".join(marks)]
    if several and (said := verdict(comparison)):
        lines.append(said)
    lines += [f"note: {caveat[0].lower()}{caveat[1:-1]}" for caveat in caveats(comparison)]
    if "time" in titles[:count] and len(comparison.runs) > 1:
        lines.append("time: measured; runs may have shared the cores (--threads 1: one after the other)")
    if count < len(titles):
        lines.append(f"in the report: {', '.join(title.partition(',')[0] for title in titles[count:])}")
    return "\n".join(lines)


def tuning_tables(tuned: "Sequence[Tuning]", comparison: "Comparison") -> list[str]:
    """The validation accuracy of every rate that was tried, the chosen ones marked; nothing if nothing was tuned."""
    from manyheads.cli.text import table

    if not tuned:
        return []
    header = [
        f"validation {comparison.score_title}, rates ×",
        *(f"{factor:g} " for factor in tuned[0].factors),
        "lr",
        "head lr",
    ]
    body = []
    for tuning in tuned:
        best = tuning.best
        scores = [
            "failed " if score is None else comparison.score(score) + ("*" if place == best else " ")
            for place, score in enumerate(tuning.scores)
        ]
        rates = ("–", "–") if best is None else (f"{tuning.chosen.lr:g}", f"{tuning.chosen.head_lr:g}")
        body.append([tuning.title, *scores, *rates])
    lines = [table([header], body)]
    if any(len(tuning.seeds) > 1 for tuning in tuned):
        lines.append("each with the first seed; where rates were run with all seeds, the mean over them")
    if ends := "; ".join(tuning.title for tuning in tuned if tuning.at_the_end):
        lines.append(f"note: the best is the first or last rate tried; give --tune factors beyond it: {ends}")
    return ["\n".join(lines)]


def _wrapped(titles: Sequence[str]) -> list[tuple[str, ...]]:
    """Titles of columns in as many lines as the longest needs, the last word of each in the last line."""
    lines = [textwrap.wrap(title, _HEADER_WIDTH)[::-1] for title in titles]
    return list(zip_longest(*lines, fillvalue=""))[::-1]
