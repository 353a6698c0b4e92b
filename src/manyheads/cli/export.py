"""``manyheads export``: one worker's trained net as a single safetensors file that explains itself."""

import argparse
import json

from manyheads.cli.parser import Parser, path, whole_number
from manyheads.errors import UserError

USAGE = "manyheads export RUN --worker K --out FILE"
ABOUT = """\
Write one worker's trained net as a safetensors file. Tensors are named as in your own net, so that its load_state_dict
takes them, except for fedrod's second head, which your net does not have. The metadata, a JSON text under 'manyheads',
says which net it is, what it takes and returns, how bytes become its inputs, which layer is the head, and how to load
it with this package.
"""

_LOAD = """\
# path: where this file lies
import json
from safetensors import safe_open
from manyheads.algorithms import get_algorithm
from manyheads.models import build

with safe_open(path, framework="pt") as file:
    about = json.loads(file.metadata()["manyheads"])
    weights = {name: file.get_tensor(name) for name in file.keys()}
net = build(about["net"], tuple(about["input_shape"]), about["num_outputs"], head=about["head"], norm=about["norm"])
net = get_algorithm(about["algorithm"])().prepare(net)
net.load_state_dict({name: weights[own] for name, own in net.module_names().items()}, assign=True)
net.eval()
# It takes floats. Where about["pixels"] is not null, byte b of a channel is (b / scale - mean) / std of that channel.
"""


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="RUN", type=path, help="directory of a finished run")
    parser.add_argument("--worker", type=whole_number, required=True, metavar="K", help="whose net")
    parser.add_argument(
        "--out", type=path, required=True, metavar="FILE", help="file to write, such as model.safetensors"
    )


def run(args: argparse.Namespace) -> None:
    from manyheads.files import write_tensors
    from manyheads.store import Run
    from manyheads.store.layout import CONSTANTS, MODELS, PARTITION, SIMILARITY

    if args.out.suffix != ".safetensors":
        raise UserError(
            f"--out {args.out}: the file will be in safetensors format: give a name ending in .safetensors."
        )
    run = Run.open(args.directory)
    if args.out.resolve() in [args.directory.resolve() / name for name in (CONSTANTS, MODELS, PARTITION, SIMILARITY)]:
        raise UserError(f"--out {args.out} is a file of the run itself: give another name.")
    net, summary = run.model(args.worker), run.summary()
    # As it stands: arrays and a loss that only Python can give are not needed.
    given = run.description
    about = {
        **run.describe_model(),
        "net": given["model"],
        "head": net.head_layer,
        "norm": given["norm"],
        "heads": net.head_names,
        "algorithm": given["algorithm"]["name"],
        "data": given["data"],
        "relabel": given["relabel"],
        "worker": args.worker,
        "run_id": summary["run_id"] if summary else None,
        "load": _LOAD,
    }
    write_tensors(args.out, net.module_state(), {"format": "pt", "manyheads": json.dumps(about)})
    print(args.out)
