"""``manyheads predict``: what one worker's trained net says about samples of your own."""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.parser import Parser, path, whole_number
from manyheads.errors import UserError, user_code
from manyheads.units import counted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from manyheads.data.pixels import Pixels
    from manyheads.store import Run

USAGE = "manyheads predict RUN --worker K --data FILE [--out FILE]"
ABOUT = """\
Classify the samples x of an npz file with one worker's trained net. With labels y in the file, the accuracy is printed;
with --out, classes and probabilities are written to an npz; with neither, the classes are printed, one per line. After
--relabel, classes are numbered as the worker itself numbers them, and there is no accuracy. A net that has no score for
each class, such as that of a regression, gives its outputs instead, a sample per line; y is then ignored.

x is [samples, ...], shaped as in training. Bytes are taken as pixels, and scaled and standardised as the run's own
were; they are refused if the net was not trained on bytes. All other numbers are used as they are, so standardise them
first: after 'from manyheads.data import load', load('cifar10').x_test holds samples as a net of that data set takes
them.
"""

_CHUNK = 128


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=path, help="directory of a finished run")
    parser.add_argument("--worker", type=whole_number, required=True, metavar="K", help="whose net")
    parser.add_argument("--data", type=path, required=True, metavar="FILE", help="npz with x and, if known, y")
    parser.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="npz to write: classes [n] and probabilities [n, C], or outputs",
    )


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from manyheads.cli.terminal import waiting
    from manyheads.data.pixels import Pixels
    from manyheads.files import disk_errors, replacing
    from manyheads.store import Run

    if args.out is not None and args.out.suffix != ".npz":
        raise UserError(f"--out {args.out}: the file will be in npz format: give a name ending in .npz.")
    if args.out is not None and args.out.resolve() == args.data.resolve():
        raise UserError(f"--out {args.out} holds the samples: give another name.")
    run = Run.open(args.directory)
    net, described = run.model(args.worker), run.describe_model()
    x, y = _read(args.data)
    wanted = described["input_shape"]
    if list(x.shape[1:]) != wanted:
        raise UserError(
            f"{args.data}: samples are {list(x.shape[1:])}, but the net takes {wanted}: give x [samples, ...] of"
            " that shape."
        )
    inputs = _inputs(x, Pixels(**described["pixels"]) if described["pixels"] else None, args.data)
    # Progress goes to stderr, as a script may read the classes from stdout.
    with redirect_stdout(sys.stderr), waiting(f"predicting {counted(len(x), 'sample')}"):
        outputs = _outputs(net, inputs)
    if not (sound := outputs.isfinite().reshape(len(x), -1).all(1).numpy()).all():
        raise UserError(
            f"{args.data}: the net's answer to sample {sound.argmin()} is not a number: give x like its train samples."
        )
    num_classes = described["num_classes"]
    answers: dict[str, Any]
    if num_classes is not None and outputs.ndim == 2 and outputs.shape[1] >= num_classes:
        probabilities = outputs.softmax(1).numpy()
        answers = {"classes": probabilities.argmax(1), "probabilities": probabilities}
        said = _accuracy(answers["classes"], y, outputs.shape[1], run, args) if y is not None else None
        lines = map(str, answers["classes"])
    else:
        # A regression, or a loss of the user's own, such as that of one logit for two classes.
        answers, said = {"outputs": outputs.numpy()}, None
        lines = (" ".join(map(str, sample.ravel())) for sample in answers["outputs"])
    if args.out is not None:
        with disk_errors(args.out), replacing(args.out) as file:
            np.savez(file, **answers)
        print(args.out)
    if said is not None:
        print(said)
    elif args.out is None:
        print("\n".join(lines))


def _read(path: Path) -> "tuple[Tensor, np.ndarray | None]":
    """Samples [samples, ...] as uint8 or float32 and, where there are any, their y."""
    import numpy as np
    import torch

    from manyheads.data.dataset import check_finite
    from manyheads.data.npz import read_npz

    arrays, _ = read_npz(path, ("x", "y"))
    x = arrays.get("x")
    if x is None:
        raise UserError(f"{path} needs an array x of numbers [samples, ...]: save it with numpy.savez(path, x=...).")
    if x.ndim < 2 or len(x) == 0 or x.dtype.kind not in "buif":
        one = ", such as x[None] of one sample" if x.ndim == 1 else ""
        raise UserError(f"{path}: x is {x.dtype} {list(x.shape)}: give numbers [samples, ...]{one}.")
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is refused by name
        samples = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32))
    check_finite(f"{path}: x", samples)
    return samples, arrays.get("y")


def _inputs(x: "Tensor", pixels: "Pixels | None", path: Path) -> "Tensor":
    """Bytes converted as for the run's own inputs; other numbers as they are."""
    if x.is_floating_point():
        if pixels is not None and not pixels.can_give(x):
            raise UserError(
                f"{path}: x goes up to {x.abs().max():g}, but bytes become inputs as {pixels}: give x as bytes (uint8),"
                " or as such inputs."
            )
        return x
    if pixels is None:
        raise UserError(
            f"{path}: x holds bytes, but the net was not trained on bytes: give x as floats like its train samples."
        )
    if (highest := int(x.max())) > pixels.scale:
        raise UserError(
            f"{path}: x goes up to {highest}, but the net's pixels go from 0 to {pixels.scale}: give x in that range."
        )
    return pixels.to_inputs_(x.float())


def _outputs(net: "nn.Module", x: "Tensor") -> "Tensor":
    """What the net gives, [samples, ...] -> [samples, ...]."""
    import torch

    dtype = next(net.parameters()).dtype
    with torch.inference_mode(), user_code("the model"):
        return torch.cat([net(part.to(dtype)) for part in x.split(_CHUNK)])


def _accuracy(classes: "np.ndarray", y: "np.ndarray", num_classes: int, run: "Run", args: argparse.Namespace) -> str:
    """What there is to say about classes [samples] where the true ones are known."""
    if y.shape != classes.shape or y.dtype.kind not in "bui":
        raise UserError(
            f"{args.data}: y is {y.dtype} {list(y.shape)}: give a class for each of the {len(classes)} samples, or no"
            " y."
        )
    if not ((y >= 0) & (y < num_classes)).all():
        raise UserError(
            f"{args.data}: y goes from {y.min()} to {y.max()}, but the net's classes are 0 to {num_classes - 1}: number"
            " them as the run's data do, or give no y."
        )
    if run.description["relabel"]:
        return f"no accuracy: after --relabel, worker {args.worker} numbers the classes in its own order"
    right = f"accuracy {100 * (classes == y).mean():.1f} % on {counted(len(y), 'sample')}"
    return f"{right}, whatever classes worker {args.worker} was trained on"
