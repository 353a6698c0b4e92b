"""The command line: ``manyheads COMMAND ...``; a command is a module with ``fill(parser)`` and ``run(args)``."""

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import current_thread, main_thread

from manyheads import __version__
from manyheads.cli.parser import Parser
from manyheads.errors import Transient, UserError, first_line, is_out_of_memory, one_line
from manyheads.machine import rank, started_together
from manyheads.network.restarts import give_up

_COMMANDS = {
    "train": "train one algorithm",
    "compare": "run several algorithms, options and seeds side by side",
    "join": "let new workers use what a run has learned",
    "report": "write a page about runs: tables, pictures, CSV",
    "study": "reproduce a table or figure of the paper",
    "inspect": "look at a graph, a split, a net's speed or memory, or a run",
    "export": "write one worker's trained net to a file",
    "predict": "use one worker's trained net on samples of your own",
}

_EXAMPLES = """\
examples:
  manyheads train deprl                    # the digits, 16 workers on a ring
  manyheads train deprl --workers 32 --graph random:0.25 --rounds 100
  manyheads train d-psgd --data my.npz --out runs/mine      # your own arrays
  manyheads compare deprl d-psgd --tune --out runs/two      # with tuned rates
  manyheads report runs/mine               # a page with tables and pictures
  manyheads inspect graph --graph exponential --workers 64  # how fast it mixes
  manyheads export runs/mine --worker 3 --out model.safetensors

Every command explains its options: manyheads COMMAND --help
"""

STOPPED = 130
"""Exit status after Ctrl-C, as shells count it, and after SIGTERM."""

BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0, or 2 after one line on stderr when the user is at fault."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without Unicode gets question marks, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    # Pictures only go into files. A notebook sets its own backend for processes it starts, which may not exist here.
    os.environ["MPLBACKEND"] = "agg"
    if started_together():
        # torch would report every lost connection in a page of addresses.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if rank() > 0 or sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # One of a comparison's, which would begin the same comparison.
            raise UserError(
                "a file of your own calls main as it is imported, which the processes of a comparison do:"
                " write if __name__ == '__main__': above the call."
            )
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except UserError as error:
        if not isinstance(error, Transient):
            give_up()
        return _fail(str(error))
    except KeyboardInterrupt as error:
        return _show(_to_show(_line(str(error) or "stopped."), interrupted=True), STOPPED)
    except BrokenPipeError:
        # The reader of our output is gone; Python must not try to flush the rest of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = error.filename or "the system, or where the output goes"
        return _fail(f"{where}: {error.strerror or error}. Give another path, or fix this one.")
    except Exception as error:
        if is_out_of_memory(error):
            return _fail("not enough memory: use fewer workers, a smaller net or batch, or a larger machine.")
        own = _line(first_line(error))
        if (shown := _to_show(own)) == own:
            raise
        return _show(shown, 1)


def _run(argv: Sequence[str]) -> int:
    try:
        args = _parser().parse(argv)
    except SystemExit as stop:  # after --help and --version
        return int(stop.code or 0)
    if started_together() and args.parser.prog != "manyheads train":
        raise UserError("only manyheads train runs in several processes: start this command without torchrun.")
    if not started_together() and current_thread() is main_thread():
        # A scheduler's SIGTERM is treated like Ctrl-C; torchrun stops its processes in a way of its own.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    # ``--model package.module:factory`` may name a module in the working directory, as for ``python -m``.
    sys.path.append(str(Path.cwd()))
    args.run(args)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="manyheads",
        usage="manyheads COMMAND ...",
        description="Personalised decentralised learning: one shared representation, many private heads, no server.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"manyheads {__version__}")
    parser.add_commands("manyheads.cli.", _COMMANDS)
    return parser


def _fail(message: str) -> int:
    return _show(_to_show(_line(message)), 2)


def _line(message: str) -> str:
    who = f"manyheads (process {number}):" if (number := rank()) else "manyheads:"
    return one_line(f"{who} {message}")


def _to_show(line: str, *, interrupted: bool = False) -> str | None:
    """What to show of a failure: with several processes, one on each machine shows the line of the first to fail."""
    if not started_together():
        return line
    from manyheads.network.meeting import failure

    return failure(line, interrupted=interrupted)


def _show(line: str | None, status: int) -> int:
    if line:
        print(line, file=sys.stderr)
    return status
