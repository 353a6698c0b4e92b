"""``manyheads inspect run``: what ran in a directory, with which options, and where it stands."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyheads.cli.parser import Commands, Parser
from manyheads.errors import UserError, flag


def add(commands: Commands) -> None:
    commands.add_parser(
        "run",
        help="what ran in a directory and where it stands",
        usage="manyheads inspect run DIR",
        description="Print what ran in a directory, with which options other than the defaults, and where it stands.",
        fill=_add_options,
        run=run,
    )


def _add_options(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="run directory")


def run(args: argparse.Namespace) -> None:
    from manyheads.algorithms import REGISTRY
    from manyheads.checkpoint import latest_round
    from manyheads.store import Run
    from manyheads.store.layout import CHECKPOINT
    from manyheads.terminal import facts, headline, summary_table

    run = Run.open(args.directory)
    description, records, summary = run.description, run.metrics(), run.summary()
    complete = summary is not None and summary["rounds"] >= description["rounds"]
    done = records[-1]["round"] if records else 0
    name = description["algorithm"]["name"]
    title = REGISTRY[name].title if name in REGISTRY else name
    print(headline(title, {**description, **{name: _shown(description[name]) for name in ("data", "model")}}))
    lines = [
        ("seed", str(description["seed"])),
        ("rounds", f"{done} of {description['rounds']}"),
        ("state", "complete" if complete else _unfinished(latest_round(args.directory / CHECKPOINT))),
        *(("option", f"{flag(name)} {_shown(value)}") for name, value in _unusual(description)),
    ]
    if run.damaged_lines:
        lines.append(("note", f"damaged lines of metrics.jsonl, left out: {run.damaged_lines}"))
    if summary is not None:
        lines += [("note", note) for note in summary.get("notes", ())]
        where = summary.get("runtime", {})
        lines.append(("computed with", ", ".join(f"{name} {value}" for name, value in where.items())))
    print(facts(lines))
    if records:
        print(f"\n{summary_table(records[-1])}")


def _unusual(description: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options that are neither a default nor the data set's recipe."""
    from manyheads.algorithms import DePRL, get_algorithm
    from manyheads.experiment import flat
    from manyheads.parts import usual_options

    try:
        kind = get_algorithm(description["algorithm"]["name"])
    except UserError:
        # One that is not registered: nobody knows what is usual for it.
        kind = DePRL
    usual = usual_options(description, kind)
    if description["precision"] in ("float32", "tf32"):
        # The default of a CPU and that of a GPU.
        usual["precision"] = description["precision"]
    said = ("algorithm", "data", "rounds", "seed")
    for name, value in flat(description).items():
        if name not in said and value is not None and usual.get(name) != value:
            yield name, value


def _unfinished(checkpoint: int) -> str:
    return f"not complete; continues from round {checkpoint}"


def _shown(value: Any) -> str:
    return str(value["kind"]) if isinstance(value, dict) else str(value)
