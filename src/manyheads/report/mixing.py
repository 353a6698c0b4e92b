"""How fast the runs' graphs mix, and what the paper's Theorem 1 makes of them."""

from dataclasses import dataclass
from typing import Any

from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison
from manyheads.report.naming import shown, words
from manyheads.report.numbers import number
from manyheads.topology import Mixing, build_mixing

_CONSTANTS = ("log10_c", "log10_one_minus_q", "log10_beta", "log10_rounds_printed", "log10_rounds_repaired")
"""A summary's constants of Theorem 1: too many and too large to be read, so that only the CSV file has them."""


@dataclass(frozen=True)
class Row:
    """A mixing and the systems that use it."""

    graph: str
    """With everything that makes its mixing another one."""
    workers: int
    systems: str
    gap: str
    verdict: str


def rows(comparison: Comparison) -> list[Row]:
    """The different mixings of the first seed, each once."""
    found: dict[tuple[Any, ...], tuple[Finished, dict[str, Any], list[str]]] = {}
    for (i, _), (run, *_) in sorted(comparison.cells.items()):
        if mixed := mixed_by(run):
            # Weights of another name may make the same mixing, as uniform ones do on a ring.
            key = (run.options["graph"], run.options["workers"], *mixed.items())
            _, _, systems = found.setdefault(key, (run, mixed, []))
            systems.append(comparison.systems[i].label)
    return [
        Row(
            _name(run),
            run.options["workers"],
            ", ".join(dict.fromkeys(systems)),
            f"{mixed['spectral_gap']:.2g}",
            mixed["theorem_1"],
        )
        for run, mixed, systems in found.values()
    ]


def mixed_by(run: Finished) -> dict[str, Any]:
    """How a run's workers mix, from its summary; empty: they do not mix on a graph, or are too many to tell."""
    gap, verdict = number(run.summary.get("spectral_gap")), run.summary.get("theorem_1")
    if gap is None or not isinstance(verdict, str):
        return {}
    constants = {name: value for name in _CONSTANTS if (value := number(run.summary.get(name))) is not None}
    return {"spectral_gap": gap, "theorem_1": verdict, **constants}


def steady_mixing(run: Finished) -> Mixing:
    """A run's mixing without failures; without a graph a ring, which is drawn as a circle."""
    options, root = run.options, run.summary.get("root")
    if not run.on_graph:
        return build_mixing("ring", options["workers"])
    weights, redraw = options.get("weights") or "metropolis", bool(options.get("redraw"))
    drawn_from = root if isinstance(root, int) else run.seed
    return build_mixing(
        options["graph"], options["workers"], weights=weights, redraw=redraw, seed=drawn_from, allow_row_stochastic=True
    )


def _name(run: Finished) -> str:
    """A run's graph and what else makes its mixing."""
    usual = {"weights": "metropolis", "redraw": False, "link_failure": 0.0, "worker_failure": 0.0}
    options = {name: run.options.get(name) or value for name, value in usual.items()}
    unusual = [f"{words(name)} {shown(value)}" for name, value in options.items() if value != usual[name]]
    return ", ".join([shown(run.options["graph"]), *unusual])
