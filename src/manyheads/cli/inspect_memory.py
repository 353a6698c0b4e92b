"""``manyheads inspect memory``: what a run will take of a GPU's memory and its host's, and how many workers fit."""

import argparse
from dataclasses import replace
from math import inf

import torch

from manyheads import data, memory
from manyheads.cli.options import add_options, experiments, given
from manyheads.cli.parser import Parser, number
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts
from manyheads.derived import federation_of, pick_device, resolve
from manyheads.engine.choose import FILLED
from manyheads.engine.cuda_graphs import describe, plan_memory, settle
from manyheads.engine.cuda_graphs.memory_plan import free_memory
from manyheads.engine.precision import Precision
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.initial import initial_model
from manyheads.units import human_bytes

USAGE = "manyheads inspect memory ALGORITHM [options]"
ABOUT = "Print how much GPU memory a run would take; needs no GPU."


def fill(parser: Parser) -> None:
    parser.add_argument(
        "--memory", type=number, metavar="GB", help="memory of the GPU [what is free on this machine's]"
    )
    add_options(parser, runtime=("data_dir", "device"))


def run(args: argparse.Namespace) -> None:
    if args.memory is not None and not 0 < 1e9 * args.memory < inf:
        raise UserError(f"--memory {args.memory:g} is not an amount of memory: give the GPU's memory in GB.")
    (asked,), runtime = experiments(args), Runtime(**given(args, Runtime))
    with waiting(f"loading {asked.data}") as downloading:
        dataset = data.load(str(asked.data), runtime.data_dir, downloading)
    precision = Precision(asked.precision or "tf32")
    experiment = replace(resolve(asked, dataset.input_shape), precision=precision.name)
    with waiting("trying the net"):
        federation = federation_of(experiment, dataset)
        plan = plan_memory(
            initial_model(experiment, federation),
            federation.train,
            batch_size=experiment.recipe.batch_size,
            precision=precision,
            extra_rows=experiment.algorithm.extra_rows,
        )
    device = pick_device(runtime.device) if torch.cuda.is_available() else torch.device("cpu")
    free = 1e9 * args.memory if args.memory else free_memory(device) if device.type == "cuda" else None
    lines, host = describe(plan), memory.available()
    if free is not None:
        filled = int(FILLED * free)
        # With --memory the GPU is another one, and so may its host be.
        settled = settle(plan, filled, None if args.memory else host)
        lines = [
            *describe(settled, host),
            (f"part of {human_bytes(free)} that a run takes", f"at most {100 * FILLED:.0f} %"),
            ("workers whose rows fit on the device", f"{replace(plan, lanes=1).largest(filled):,}"),
        ]
    if host is not None:
        most = f"{plan.workers_in(host):,} ({human_bytes(host)})"
        lines.append(("workers whose rows fit into this machine's free memory", most))
    print(facts(lines))
