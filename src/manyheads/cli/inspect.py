"""``manyheads inspect``: what would run, and what has run."""

from manyheads.cli import inspect_constants, inspect_data, inspect_graph, inspect_memory, inspect_run, inspect_speed
from manyheads.cli.parser import Commands


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="look at a graph, a split, a net's speed or memory, or a run",
        usage="manyheads inspect COMMAND ...",
        description="Look at a graph, a split, a net's speed or memory before it is used, or at a run.",
    )
    inner = parser.add_commands()
    for command in (inspect_graph, inspect_data, inspect_speed, inspect_memory, inspect_run, inspect_constants):
        command.add(inner)
