"""The report of a run or a comparison: one HTML page that needs no network, its pictures, and every number as CSV."""

from manyheads.report.comparison import Comparison, collect
from manyheads.report.page import write, write_report

__all__ = ["Comparison", "collect", "write", "write_report"]
