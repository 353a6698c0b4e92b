"""``manyheads inspect speed``: how long a mini-batch of a net takes on this machine, for the simulated clock."""

import argparse

from manyheads import data
from manyheads.cli.options import add_fields, given
from manyheads.cli.parser import Parser
from manyheads.cli.terminal import waiting
from manyheads.cli.text import facts
from manyheads.compatibility import check_batch_size
from manyheads.derived import resolve
from manyheads.experiment import Experiment, Runtime
from manyheads.initial import few_of, initial_model
from manyheads.metrics.clock import measure_step_seconds
from manyheads.models.split import constants_of

USAGE = "manyheads inspect speed [options]"
ABOUT = "Measure how long one core takes for a mini-batch of a net: what to give as --step-seconds."

_OPTIONS = ("data", "model", "head", "norm", "batch_size", "precision")


def fill(parser: Parser) -> None:
    add_fields(parser, Experiment, _OPTIONS, title="data and net")
    add_fields(parser, Runtime, ("data_dir",), title="where")


def run(args: argparse.Namespace) -> None:
    asked, runtime = Experiment(**given(args, Experiment)), Runtime(**given(args, Runtime))
    with waiting(f"loading {asked.data}") as downloading:
        dataset = data.load(str(asked.data), runtime.data_dir, downloading)
    experiment = resolve(asked, dataset.input_shape)
    everything = data.federate(dataset, workers=1, split="iid", validation=0.0, seed=experiment.seed)
    model = initial_model(experiment, everything)
    check_batch_size(experiment, model)
    with waiting(f"training {experiment.model}"):
        seconds = measure_step_seconds(model, few_of(everything.train.x, experiment.recipe.batch_size))
    trained, held = (
        sum(leaf.numel() for leaf in leaves) for leaves in (model.parameters(), constants_of(model).values())
    )
    print(
        facts(
            [
                ("net", str(experiment.model)),
                ("parameters", f"{trained:,}" + (f", and {held:,} with requires_grad=False" if held else "")),
                ("samples in a mini-batch", str(experiment.batch_size)),
                ("assumed by default", f"{experiment.step_seconds:g} s"),
                ("measured on one core", f"{seconds:.2g} s"),
            ]
        )
    )
    print(f"--step-seconds {seconds:.2g}")
