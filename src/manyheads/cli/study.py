"""``manyheads study``: a table or figure of the paper: its runs, as far as they are not recorded, and a report."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from manyheads.cli.board import Shown, follow
from manyheads.cli.options import add_fields, options_of
from manyheads.cli.parser import Parser, number, path
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts, table
from manyheads.data import load
from manyheads.derived import check_precision, pick_device
from manyheads.errors import UserError
from manyheads.experiment import Experiment, Runtime
from manyheads.files import locked, make_folder
from manyheads.studies import STUDIES, get_study
from manyheads.studies.cost import Costs, total
from manyheads.studies.everything import NAME, TITLE, in_order, write_index
from manyheads.studies.records import Records
from manyheads.studies.runner import Runner
from manyheads.studies.trial import PAPER, QUICK, Size, Trial, only, without_repeats
from manyheads.units import counted, human_bytes, human_seconds

USAGE = "manyheads study NAME [options]"
ABOUT = "Make the runs behind a table or figure of the DePRL paper and report on them."
EXAMPLES = """\
examples:
  manyheads study --list
  manyheads study table3 --quick           # a small version, a minute at most
  manyheads study table3 --dry-run         # its runs, their time and memory
  manyheads study table3 --only data=cifar10 seed=1 --data-dir DIR
  manyheads study all --budget-seconds 600 --no-checkpoints
  manyheads study all --report             # on what is recorded

What a study needs from its runs is kept in OUT/records, without weights: runs that are recorded there are not run
again, whichever study they were made for. A study that was stopped or killed is continued by the same command.
"""

_RUNTIME = ("data_dir", "device", "engine", "threads")
_OUT, _QUICK_OUT, _WORK = Path("results"), Path("runs", "quick"), Path("runs", "studies")


def fill(parser: Parser) -> None:
    options = options_of(Experiment)
    parser.add_argument("name", metavar="NAME", nargs="?", help="a study, or 'all': the most telling runs first")
    parser.add_argument("--list", action="store_true", help="list the studies")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and what it would take")
    parser.add_argument("--quick", action="store_true", help="a small version on the digits")
    parser.add_argument("--report", action="store_true", help="only report on what is recorded")
    parser.add_argument("--out", type=path, help=f"folder of records and reports [{_OUT}; --quick: {_QUICK_OUT}]")
    parser.add_argument(
        "--work", type=path, default=_WORK, help=f"where runs keep their weights until they are recorded [{_WORK}]"
    )
    parser.add_argument("--seeds", nargs="+", type=options["seed"].read, metavar="N", help="instead of the paper's")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KEY=VALUE", help="run only these, as in algorithm=deprl,d-psgd"
    )
    parser.add_argument(
        "--precision",
        type=options["precision"].read,
        default="float32",
        metavar="{" + ",".join(options["precision"].choices) + "}",
        help="Number format of the training. [float32]",
    )
    parser.add_argument("--budget-seconds", type=number, metavar="X", help="skip runs that would not end in time")
    parser.add_argument(
        "--no-checkpoints",
        action="store_true",
        help="write no weights: a run that is stopped, even in its last round, is lost and begins anew; finished runs"
        " are kept",
    )
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    add_fields(parser, Runtime, _RUNTIME, title="where and how")


def run(args: argparse.Namespace) -> None:
    folder = args.out or (_QUICK_OUT if args.quick else _OUT)
    if args.list:
        print(facts([*((study.name, study.title) for study in STUDIES.values()), (NAME, TITLE)]))
        return
    if args.name is None:
        raise UserError(f"no study given: name one of {', '.join(STUDIES)}, or {NAME}; --list says what they are.")
    if args.budget_seconds is not None and not args.budget_seconds > 0:
        raise UserError(f"--budget-seconds {args.budget_seconds:g} is not positive: give seconds above 0.")
    if args.dry_run and args.report:
        raise UserError("--dry-run lists runs and --report makes none: give one of them.")
    if args.dry_run:
        with waiting("listing the runs", quiet=args.quiet):
            plan = _plan(_asked(args)[1], Records(folder), args)
        print(plan)
        return
    size, trials = _asked(args)
    if args.report and not (records := Records(folder).folder).is_dir():
        raise UserError(f"nothing is recorded in {records}: make the study's runs, or give the --out that has them.")
    if not args.report:
        # Otherwise every run would be refused by itself.
        check_precision(args.precision, pick_device(_runtime(args).device))
    with locked(folder):
        errors = {} if args.report else _run(trials, folder, args)
        # A machine that only makes runs need not have what shows them.
        _report(args.name, size, folder, quiet=args.quiet or not args.report)
    if errors:
        (first, why), *_ = errors.items()
        raise UserError(f"{counted(len(errors), 'run')} failed, the first {first}: {why}")


def _asked(args: argparse.Namespace) -> tuple[Size, list[Trial]]:
    """How large the study is, and those of its trials that were asked for, each run once."""
    size = replace(QUICK if args.quick else PAPER, precision=args.precision)
    if args.seeds:
        size = replace(size, seeds=tuple(dict.fromkeys(args.seeds)))
    trials = in_order(STUDIES, size) if args.name == NAME else get_study(args.name).grid(size)
    return size, without_repeats(only(trials, args.only))


def _plan(trials: Sequence[Trial], records: Records, args: argparse.Namespace) -> str:
    """The runs that are not recorded, with their time and memory."""
    device = pick_device(_runtime(args).device).type
    missing = records.missing(trials)
    estimates = Costs(records.folder, device).of_all(missing)
    body = [
        [trial.name, str(trial.rounds), human_seconds(one.seconds), human_bytes(one.bytes)]
        for trial, one in zip(missing, estimates, strict=True)
    ]
    whole = total(estimates)
    said = f"{counted(len(trials), 'run')}, {len(trials) - len(missing)} of them recorded."
    if not missing:
        return said
    kind = "measured on similar runs" if whole.measured else "estimates"
    sums = f"{human_seconds(whole.seconds)} in all, {human_bytes(whole.bytes)} at most ({kind})"
    return f"{table([('run', 'rounds', 'time', 'memory')], body)}\n\n{said} The others on {device}: {sums}."


def _run(trials: Sequence[Trial], folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Make the runs that are not recorded; why some failed, by name."""
    make_folder(args.work)
    runtime, records = _runtime(args), Records(folder)
    missing = records.missing(trials)
    if not args.quiet:
        print(f"{args.name}: {len(missing)} of {counted(len(trials), 'run')} still to be made", flush=True)
    missing = _with_data(missing, runtime.data_dir, strict=args.name != NAME)
    runner = Runner(records, args.work, runtime, checkpoints=not args.no_checkpoints)
    estimates = Costs(records.folder, pick_device(runtime.device).type).of_all(missing)
    shown = [
        Shown(trial.name, trial.rounds, one.seconds / trial.rounds)
        for trial, one in zip(missing, estimates, strict=True)
    ]
    with closing(runner.run(missing, args.budget_seconds)) as news:
        errors = follow(news, shown, args.name, quiet=args.quiet)
    if left := sum(not records.have(trial) for trial in missing) - len(errors):
        print(f"{counted(left, 'run')} left: the same command makes the rest when given more time.", flush=True)
    return {name: news.error for name, news in errors.items()}


def _runtime(args: argparse.Namespace) -> Runtime:
    """Where and how; --out is the study's folder, not a run's."""
    return Runtime(**{name: vars(args)[name] for name in _RUNTIME if name in args})


def _with_data(trials: Sequence[Trial], data_dir: Path | None, *, strict: bool) -> list[Trial]:
    """The trials whose data can be read. Where not all can: an error, or a note if not ``strict``."""
    unread: set[str] = set()
    for name in dict.fromkeys(trial.data for trial in trials if isinstance(trial.experiment.data, str)):
        try:
            load(name, data_dir)
        except UserError as error:
            if strict:
                raise
            print(f"note: left out: {error}", flush=True)
            unread.add(name)
    return [trial for trial in trials if trial.data not in unread]


def _report(name: str, size: Size, folder: Path, *, quiet: bool) -> None:
    """Write the report of the study, or of all with a list of them, as far as something is recorded."""
    records = Records(folder)
    asked = STUDIES.values() if name == NAME else [STUDIES[name]]
    studies = [study for study in asked if any(map(records.have, study.grid(size)))]
    if not studies:
        print(f"no report: nothing is recorded in {records.folder}")
    for study in studies:
        try:
            with waiting(f"reporting on {study.name}", quiet=quiet):
                page = study.write(size, records, folder)
        except ModuleNotFoundError as error:
            print(f"no report here, as {error.name} is not installed; the records are in {records.folder}")
            return
        print(page)
    if name == NAME and studies:
        print(write_index(studies, size, records, folder))
