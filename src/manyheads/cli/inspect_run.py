"""``manyheads inspect run``: what ran in a directory, with which options, and where it stands."""

import argparse
from collections.abc import Iterator
from typing import Any

from manyheads.cli.parser import Parser, path
from manyheads.errors import flag

USAGE = "manyheads inspect run RUN"
ABOUT = "Print what ran in a directory, which options differ from the defaults, and how far it has come."


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=path, help="run directory")


def run(args: argparse.Namespace) -> None:
    from manyheads.algorithms import attribute_of
    from manyheads.checkpoint import latest_round
    from manyheads.cli.text import facts, headline, summary_table
    from manyheads.store import Run
    from manyheads.store.layout import CHECKPOINT, SITE, read_object

    run = Run.open(args.directory)
    description, records, summary = run.description, run.metrics(), run.summary()
    last = records[-1] if records else None
    if run.finished and summary is not None:
        last = {**summary, "round": summary["rounds"]}
    done = last["round"] if last else 0
    name = description["algorithm"]["name"]
    title = attribute_of(name, description["algorithm"], "title") or (summary or {}).get("title") or name
    print(headline(title, {**description, **{name: _shown(description[name]) for name in ("data", "model")}}))
    unfinished = f"not complete; continues from round {latest_round(args.directory / CHECKPOINT)}"
    lines = [
        ("seed", str(description["seed"])),
        ("rounds", f"{done} of {description['rounds']}"),
        ("state", "complete" if run.finished else unfinished),
        *_unusual(description),
    ]
    if run.damaged_lines:
        lines.append(("note", f"damaged lines of metrics.jsonl, left out: {run.damaged_lines}"))
    if run.finished and (not records or records[-1]["round"] != done):
        lines.append(("note", "metrics.jsonl has lost the last rounds"))
    if last and (site := read_object(run.path / SITE)) is not None:
        lines += _own_workers(site["workers"], run.workers(), last)
    if summary is not None:
        lines += [("note", note) for note in summary.get("notes", ())]
        where = summary.get("runtime", {})
        lines.append(("computed with", ", ".join(f"{name} {value}" for name, value in where.items())))
    print(facts(lines))
    if last:
        print(f"\n{summary_table(last)}")


def _own_workers(own: list[int], rounds: list[dict[str, Any]], last: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The workers of a site with their scores in the last round, a line each."""
    from manyheads.cli.text import score, score_name

    values = next((line.get("accuracy") for line in rounds[::-1] if line["round"] == last["round"]), None)
    scores = dict(enumerate(values if isinstance(values, list) else []))
    for worker in own:
        said = score({**last, "own": scores.get(worker)}, "own")
        yield "worker here", f"{worker}, {score_name(last)} {said}"


def _unusual(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The options that are neither a default nor the data set's recipe, as (label, value) lines."""
    from manyheads.algorithms import DePRL, find_algorithm
    from manyheads.algorithms.join import Join
    from manyheads.derived import usual_options
    from manyheads.experiment import flat

    # The defaults of an unregistered algorithm are not known.
    kind = find_algorithm(description["algorithm"]["name"]) or DePRL
    usual = usual_options(description, kind)
    if description["precision"] in ("float32", "tf32"):
        # These are the defaults of a CPU and of a GPU.
        usual["precision"] = description["precision"]
    said = {"algorithm", "data", "rounds", "seed", *kind.provenance}
    if kind is Join:
        # Which run new workers build upon is said by a note; that their rates do not fall is no option.
        said |= {"teacher", "decay"}
    for name, value in flat(description).items():
        if name in said or value is None or usual.get(name) == value:
            continue
        if name == "learned_by":
            # It follows from the run that was joined, and is not an option.
            yield "learned by", str(value)
        else:
            yield "option", flag(name) if value is True else f"{flag(name)} {_shown(value)}"


def _shown(value: Any) -> str:
    return str(value.get("kind", value)) if isinstance(value, dict) else str(value)
