"""All studies as one list of runs, the most telling first, for when time is short.

CIFAR-10 on a ring comes first, by heterogeneity, with DePRL, D-PSGD and DisPFL before the others; then the other data
sets in the same order; then graphs, new workers and ablations; and after that the same with each further seed.
"""

from collections.abc import Iterable
from pathlib import Path

from manyheads.data.dataset import RAW
from manyheads.studies.records import Records
from manyheads.studies.results import Report
from manyheads.studies.study import Study
from manyheads.studies.trial import Size, Trial, without_repeats
from manyheads.units import counted

NAME = "all"
TITLE = "All of them, the most telling runs first"

_DATA = ("digits", "cifar10", "cifar100", "fashion-mnist", "mobiact", "quadratic")
_FIRST_ALGORITHMS = ("deprl", "d-psgd", "dispfl")
_STUDIES = (
    "table3", "table1", "table2", "table4", "ambiguities", "consensus", "similarity", "curves", "tau", "workers",
    "table5", "loss", "speedup", "theory",
)  # fmt: skip


def in_order(studies: dict[str, Study], size: Size) -> list[Trial]:
    """Every run of every study once."""

    def rank(pair: tuple[str, Trial]) -> tuple[int, ...]:
        study, trial = pair
        place = trial.place
        return (
            size.seeds.index(place["seed"]),
            _STUDIES.index(study),
            _DATA.index(trial.data.removesuffix(RAW)),
            0 if place["algorithm"] in _FIRST_ALGORITHMS else 1,
            # New workers that build on the same run stay together, in the order of their study.
            0 if trial.new is not None else round(100 * float(str(place.get("dirichlet", 0)).partition(":")[0])),
            _FIRST_ALGORITHMS.index(place["algorithm"]) if place["algorithm"] in _FIRST_ALGORITHMS else 0,
        )

    pairs = [(name, trial) for name in _STUDIES for trial in studies[name].grid(size)]
    return without_repeats(trial for _, trial in sorted(pairs, key=rank))


def write_index(studies: Iterable[Study], size: Size, records: Records, folder: Path) -> Path:
    """Write ``README.md``, which leads to the reports of some studies and says how far each is."""
    report, trials = Report("README", "Results"), {study: study.grid(size) for study in studies}
    every = without_repeats(trial for asked in trials.values() for trial in asked)
    report.parts.append(
        f"The tables and figures of the paper, and what came out. {sum(map(records.have, every))} of "
        f"{counted(len(every), 'different run')} are recorded; a run counts in every study that needs it."
    )
    report.add_table(
        ["study", "recorded"],
        (
            [f"[{study.title}]({study.name}.md)", f"{sum(map(records.have, asked))} of {counted(len(asked), 'run')}"]
            for study, asked in trials.items()
        ),
    )
    return report.write(folder)
