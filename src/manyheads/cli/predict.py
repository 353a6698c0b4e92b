"""``manyheads predict``: what one worker's trained net says about samples of your own."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.cli.parser import Commands, Parser, whole_number
from manyheads.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

_CHUNK = 1024

_ABOUT = """\
Classify the samples x of an npz file with one worker's trained net. With labels y in the file, the accuracy is printed;
with --out, classes and probabilities are written to an npz; with neither, the classes are printed, one a line. After
--relabel, classes are numbered as the worker itself numbers them, and there is no accuracy.

x is [samples, ...] as the net was trained: bytes are taken as pixels and scaled to 0..1, all other numbers are taken as
they are. A net trained on a named data set expects that data set's own normalisation: after 'from manyheads.data import
load', load('cifar10').x_test holds samples as such a net takes them.
"""


def add(commands: Commands) -> None:
    commands.add_parser(
        "predict",
        help="use one worker's trained net on samples of your own",
        usage="manyheads predict RUN --worker K --data FILE [--out FILE]",
        description=_ABOUT,
        fill=_add_options,
        run=run,
    )


def _add_options(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=Path, help="directory of a finished run")
    parser.add_argument("--worker", type=whole_number, required=True, metavar="K", help="whose net")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="npz with x and, if known, y")
    parser.add_argument("--out", type=Path, metavar="FILE", help="npz to write: classes [n] and probabilities [n, C]")


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from manyheads.files import disk_errors, replacing
    from manyheads.store import Run

    if args.out is not None and args.out.suffix != ".npz":
        raise UserError(f"--out {args.out}: the file is of the npz format: give a name ending in .npz.")
    if args.out is not None and args.out.resolve() == args.data.resolve():
        raise UserError(f"--out {args.out} holds the samples: give another name.")
    run = Run.open(args.directory)
    net, summary = run.model(args.worker), run.summary()
    if summary is not None and summary["majority_floor"] is None:
        raise UserError(
            f"the nets of {run.path} give numbers, not classes: use them in Python, with Run.open(...).model."
        )
    x, y = _read(args.data)
    wanted = run.describe_model()["input_shape"]
    if list(x.shape[1:]) != wanted:
        raise UserError(
            f"{args.data}: samples are {list(x.shape[1:])}, the net takes {wanted}: give x [samples, ...] so."
        )
    probabilities = _predict(net, x)
    classes, num_classes = probabilities.argmax(1), probabilities.shape[1]
    if y is not None and not ((y >= 0) & (y < num_classes)).all():
        raise UserError(
            f"{args.data}: y goes from {y.min()} to {y.max()}; the net's classes are 0 to {num_classes - 1}."
        )
    if args.out is not None:
        with disk_errors(args.out), replacing(args.out) as file:
            np.savez(file, classes=classes, probabilities=probabilities)
        print(args.out)
    if y is not None and run.description["relabel"]:
        print(f"no accuracy: after --relabel, worker {args.worker} numbers the classes in its own order")
    elif y is not None:
        print(f"accuracy {100 * (classes == y).mean():.1f} % on {len(y)} samples")
    elif args.out is None:
        print("\n".join(map(str, classes)))


def _read(path: Path) -> "tuple[np.ndarray, np.ndarray | None]":
    """Inputs [samples, ...] float32 and, where there are any, labels [samples]."""
    import numpy as np
    import torch

    from manyheads.data.arrays import read_npz
    from manyheads.data.dataset import check_finite

    arrays = read_npz(path, ("x", "y"))
    x, y = arrays.get("x"), arrays.get("y")
    if x is None or x.ndim < 2 or len(x) == 0 or x.dtype.kind not in "buif":
        raise UserError(f"{path} needs an array x of numbers [samples, ...]: save it with numpy.savez(path, x=...).")
    if y is not None and (y.shape != x.shape[:1] or y.dtype.kind not in "bui"):
        raise UserError(
            f"{path}: y is {y.dtype} {list(y.shape)}; give a class for each of the {len(x)} samples, or no y."
        )
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is refused by name
        inputs = x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1)
    check_finite(f"{path}: x", torch.from_numpy(inputs))
    return inputs, y


def _predict(net: "nn.Module", x: "np.ndarray") -> "np.ndarray":
    """Probabilities of the classes, [samples, ...] -> [samples, C]."""
    import torch

    dtype = next(net.parameters()).dtype
    with torch.inference_mode():
        parts = [net(part.to(dtype)).softmax(1) for part in torch.from_numpy(x).split(_CHUNK)]
    return torch.cat(parts).numpy()
