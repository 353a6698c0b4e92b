"""The report of a run or a comparison: one HTML page that needs no network, its pictures, and every number as CSV."""

from manyheads.report.comparison import Comparison, collect
from manyheads.report.page import write

__all__ = ["Comparison", "collect", "write"]
