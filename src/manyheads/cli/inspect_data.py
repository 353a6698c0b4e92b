"""``manyheads inspect data``: how a split deals a data set to the workers, in numbers, by users and as a map."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyheads import data
from manyheads.cli import figures
from manyheads.cli.options import add_fields, given
from manyheads.cli.parser import Parser, path
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts, table
from manyheads.data import Federation
from manyheads.data.federation import describe
from manyheads.derived import federation_of, resolve
from manyheads.errors import one_line
from manyheads.experiment import Experiment, Runtime
from manyheads.units import counted, some

USAGE = "manyheads inspect data [options]"
ABOUT = "Print how a split deals a data set to the workers, by users too, and draw the worker-by-class map."

_OPTIONS = ("data", "workers", "split", "test_split", "relabel", "validation", "seed")
_SHADES = " ░▒▓█"
_LEGEND = "of the worker's samples: ░ below 25 %, ▒ below 50 %, ▓ below 75 %, █ more"
_MOST_ROWS, _MOST_COLUMNS = 39, 60


def fill(parser: Parser) -> None:
    add_fields(parser, Experiment, _OPTIONS, title="data and split")
    add_fields(parser, Runtime, ("data_dir",), title="where")
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="picture: .png, .svg or .pdf [data-NAME-SPLIT-WORKERS.png]"
    )


def run(args: argparse.Namespace) -> None:
    experiment, runtime = resolve(Experiment(**given(args, Experiment)), ()), Runtime(**given(args, Runtime))
    name = str(experiment.data)
    split = str(experiment.split).replace(":", "-")
    out = args.out or Path(f"data-{Path(name).stem}-{split}-{experiment.workers}.png")
    figures.check_name(out)
    with waiting(f"loading {name}") as downloading:
        dataset = data.load(name, runtime.data_dir, downloading)
    federation = federation_of(experiment, dataset)
    print(facts(describe(federation)))
    if experiment.split == "natural" and dataset.user_train is not None:
        print(f"\n{users_table(federation, dataset.user_train, dataset.named)}")
    if federation.class_counts is None:
        return
    counts = federation.class_counts.numpy()
    print(f"\n{text_map(counts)}\n")
    figures.class_map(counts, out)
    print(out)


def users_table(federation: Federation, user: Tensor, named: Callable[[int], str]) -> str:
    """A line for each worker: whose samples it holds, of those to train on; ``user`` [samples] says whose each is."""
    body = []
    for worker in range(len(federation.ids)):
        held = [part.index[part.rows(worker)] for part in (federation.train, federation.validation)]
        # Names come from the file and may contain anything.
        body.append([f"{worker:>6}", one_line(some([*map(named, user[torch.cat(held)].unique().tolist())]))])
    return table([["worker", "users"]], body, words=2)


def text_map(counts: np.ndarray) -> str:
    """A line for each worker, a shade for each class: what part of the worker's samples is of it. ``counts`` [W, C]."""
    num_workers, num_classes = counts.shape
    together = -(-num_classes // _MOST_COLUMNS)
    starts = np.arange(0, num_classes, together)
    grouped = np.add.reduceat(counts, starts, axis=1)
    share = grouped / np.maximum(1, grouped.sum(1, keepdims=True))
    # The lightest shade is kept for cells that hold anything at all.
    level = np.where(grouped > 0, 1 + (share * (len(_SHADES) - 1)).astype(int), 0).clip(max=len(_SHADES) - 1)
    wide = min(3, _MOST_COLUMNS // len(starts))
    lines = [f"worker  samples  classes 0 to {num_classes - 1}" + (f", {together} in a column" if together > 1 else "")]
    for worker in range(min(num_workers, _MOST_ROWS)):
        cells = "".join(_SHADES[shade] * wide for shade in level[worker])
        lines.append(f"{worker:>6}  {counts[worker].sum():>7}  │{cells}│")
    if num_workers > _MOST_ROWS:
        lines.append(f"{'...':>6}  and {counted(num_workers - _MOST_ROWS, 'more worker')} in the picture")
    return "\n".join([*lines, _LEGEND])
