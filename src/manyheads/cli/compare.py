"""``manyheads compare``: several algorithms, options and seeds on the same data, side by side, and who is ahead."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from manyheads.cli.board import Shown, follow
from manyheads.cli.options import add_options, experiments, given, options_of
from manyheads.cli.parser import Parser, number, one_of_several, path
from manyheads.cli.tables import result_table, tuning_table
from manyheads.cli.terminal import waiting
from manyheads.cli.text import columns
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime, flat
from manyheads.files import locked
from manyheads.grid import SEEDS, distinct, plan
from manyheads.jobs import Job, News, run_jobs
from manyheads.report import open_comparison, write
from manyheads.report.spreadsheets import reported
from manyheads.store.layout import EXPERIMENT, finished_rounds, read_description
from manyheads.tune import FACTORS, Tuning, choose, tunings, with_rates
from manyheads.units import counted, some

USAGE = "manyheads compare ALGORITHM... [options] --out DIR"
ABOUT = "Run several algorithms, options and seeds side by side, over the cores, and report on them."
EXAMPLES = """\
examples:
  manyheads compare deprl d-psgd local --workers 32 --out runs/three
  manyheads compare deprl fedrep --graph ring full --split iid dirichlet:0.3 \\
    --out runs/grid
  manyheads compare deprl d-psgd --relabel --tune --out runs/tuned

Any option may take several values: every combination is run with every seed. Algorithms that do not have
an option ignore it. A comparison that was stopped or killed is continued by the same command, which does only what is
missing.
"""

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

_TUNING = ("tuning on the first seed", "best rates on the other seeds")
_TUNING_ON = "next best rates on the other seeds"
"""What the runs of a tuning are for, part by part; the last parts are for rates that turn out better than the best."""


def fill(parser: Parser) -> None:
    parser.add_argument(
        "--seeds",
        dest="seed",
        nargs="+",
        type=one_of_several(options_of(Experiment)["seed"].read),
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"the seeds to average over (which, not how many) [{' '.join(map(str, SEEDS))}]",
    )
    parser.add_argument(
        "--tune",
        nargs="*",
        type=one_of_several(number),
        metavar="FACTOR",
        help="tune each algorithm's rates on the validation split, trying these multiples of them"
        f" [{' '.join(f'{factor:g}' for factor in FACTORS)}]",
    )
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    parser.add_argument("--out", type=path, metavar="DIR", default=argparse.SUPPRESS, help="folder for all runs")
    add_options(parser, several=True, runtime=_RUNTIME)


def run(args: argparse.Namespace) -> None:
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
            part = chain(_TUNING, repeat(_TUNING_ON))
            failed = choose(tuned, lambda jobs: _run(jobs, runtime, next(part), validation=True, quiet=args.quiet))
            # Nothing is left to run: the chosen rates have been run with every seed.
            jobs = plan(with_rates(wanted, tuned), folder)
        else:
            failed = _run(jobs, runtime, "running", quiet=args.quiet)
        _conclude(folder, jobs, tuned, failed, quiet=args.quiet)


def _refuse_another(folder: Path, jobs: Sequence[Job], *, tuned: bool) -> None:
    """Refuse a folder whose report is also about runs that are not asked for now: the new one would lack them."""

    def keys(description: Mapping[str, Any]) -> tuple[str, str]:
        """What a run computes, with its number of rounds and without; tuning may choose other rates."""
        named = {name: it for name, it in flat(description).items() if not tuned or name not in ("lr", "head_lr")}
        return json.dumps(named, sort_keys=True), json.dumps({**named, "rounds": None}, sort_keys=True)

    # A run may be extended to more rounds, unless its algorithm looks at their number.
    exact, extended = zip(*(keys(job.experiment.describe()) for job in jobs), strict=True)
    asked = {exact[i] if job.experiment.uses_rounds else extended[i] for i, job in enumerate(jobs)}
    for run in reported(folder):
        path = folder / run / EXPERIMENT
        if not path.exists():
            continue
        description = read_description(path)
        here = keys(description)
        if not asked.isdisjoint(here):
            continue
        if here[1] in extended:
            raise UserError(
                f"{folder} holds a report on {run}, which has another number of rounds; as its training depends on that"
                f" number, it cannot be extended: give --rounds {description['rounds']}, or choose another --out."
            )
        raise UserError(
            f"{folder} holds a report on runs that are not asked for here, such as {run}: ask for them too, or choose"
            " another --out."
        )


def _conclude(
    folder: Path, jobs: Sequence[Job], tuned: Sequence[Tuning], failed: Mapping[str, News], *, quiet: bool
) -> None:
    """Write the report, print the tables, and say what failed."""
    try:
        # Of these runs, and no others that the folder may hold.
        comparison = open_comparison(folder, {job.path for job in jobs if job.label not in failed})
        with waiting("drawing the report", quiet=quiet):
            page = write(comparison)
    except UserError:
        # Without the failed runs the grid may be incomplete: then the failure is what to report.
        if not failed:
            raise
    else:
        said = [tuning_table(tuned, comparison)] if tuned else []
        said.append(result_table(comparison, columns()))
        if longer := sum(finished_rounds(job.path) > job.rounds for job in jobs):
            said.append(f"note: {counted(longer, 'run')} had more rounds than asked for, and the last is shown.")
        print()
        print(*said, page, sep="\n\n")
    if failed:
        reason = next(iter(failed.values())).error
        raise UserError(f"{len(failed)} failed: {some([*failed], between='; ')}. The first: {reason}")


def _run(
    jobs: Sequence[Job], runtime: Runtime, title: str, *, validation: bool = False, quiet: bool
) -> dict[str, News]:
    """Run jobs and show it; those that failed, by label."""
    shown = [Shown(job.label, job.rounds) for job in jobs]
    finished = sum(job.finished for job in jobs)
    with closing(run_jobs(jobs, runtime)) as news:
        return follow(news, shown, title, finished=finished, validation=validation, quiet=quiet)
