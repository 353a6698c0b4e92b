"""The report of a run or a comparison: one HTML page that needs no network, its pictures, and every number as CSV."""

from manyheads.report.comparison import Comparison, open_comparison
from manyheads.report.page import write

__all__ = ["Comparison", "open_comparison", "write"]
