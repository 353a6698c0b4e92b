"""A study: the trials behind one table or figure of the paper, and the report on what came out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manyheads.studies.records import Records
from manyheads.studies.results import Report, Results
from manyheads.studies.trial import Size, Trial


@dataclass(frozen=True)
class Study:
    """One table or figure."""

    name: str
    title: str
    grid: Callable[[Size], list[Trial]]
    """The runs it takes."""
    report: Callable[[Results, Report], None]
    """Fills a report with what the recorded runs came to."""

    def write(self, size: Size, records: Records, folder: Path) -> Path:
        """Write the report into a folder; gives its page."""
        results, report = Results(self.grid(size), records), Report(self.name, self.title)
        self.report(results, report)
        report.parts.insert(0, results.about(deviations="±" in "".join(report.parts)))
        return report.write(folder)
