"""``manyheads report``: one HTML page about a run or a comparison, with its pictures and every number as CSV."""

import argparse

from manyheads.cli.parser import Parser, path

USAGE = "manyheads report DIR"
ABOUT = """\
Report on all finished runs under a folder: DIR/report.html, a page that opens without a network, its pictures in
DIR/figures (SVG, PNG and PDF) and every number in DIR/csv, with the table for LaTeX; the table is printed too. The runs
must agree on everything but the algorithm and its options, the seed, options that were run as a full grid, and what
follows from the data set.
"""


def fill(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", type=path, help="a run, or a folder of runs")


def run(args: argparse.Namespace) -> None:
    from manyheads.cli.tables import result_table
    from manyheads.cli.terminal import waiting
    from manyheads.cli.text import columns
    from manyheads.report import open_comparison, write

    with waiting("reading the runs"):
        comparison = open_comparison(args.directory)
    for remark in comparison.remarks:
        print(f"note: {remark}")
    with waiting("drawing"):
        page = write(comparison)
    print()
    print(result_table(comparison, columns()), page, sep="\n\n")
