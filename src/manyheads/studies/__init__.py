"""The paper's tables and figures as studies: the runs each takes, and the report on what came out."""

from manyheads.errors import unknown
from manyheads.studies import ablations, ambiguities, consensus, curves, everything, similarity, speedup, tables, theory
from manyheads.studies.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for family in (tables, speedup, curves, similarity, ablations, consensus, theory, ambiguities)
    for study in family.STUDIES
}
"""Every study by name."""


def get_study(name: str) -> Study:
    """The study called ``name``."""
    if name not in STUDIES:
        raise unknown("study", name, [*STUDIES, everything.NAME])
    return STUDIES[name]
