"""How fast the runs' graphs mix, and what the paper's Theorem 1 makes of them."""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from manyheads.metrics.theorem import Mixed, TheoremConstants, describe
from manyheads.report.collect import Finished
from manyheads.report.comparison import Comparison, shown, words
from manyheads.topology import Mixing, build_mixing

CONSTANTS = ("C", "1 − q", "largest β", "fewest rounds, as printed", "fewest rounds, repaired")
"""What the fields of TheoremConstants are called."""


@dataclass(frozen=True)
class Row:
    """A mixing and the systems that use it."""

    graph: str
    """With everything that makes its mixing another one."""
    workers: int
    systems: str
    gap: str
    powers: tuple[str, ...]
    """log10 of the constants, in the order of CONSTANTS; empty where the theorem does not apply."""
    verdict: str


def rows(comparison: Comparison) -> list[Row]:
    """The different mixings of the first seed, each once."""
    found: dict[tuple[str, int, Mixed], tuple[str, dict[str, None]]] = {}
    for (i, _), (run, *_) in sorted(comparison.cells.items()):
        if (mixed := mixed_by(run)) is not None:
            # Weights of another name may make the same mixing, as uniform ones do on a ring.
            key = (run.options["graph"], run.options["workers"], mixed)
            _, systems = found.setdefault(key, (_name(run), {}))
            systems[comparison.systems[i].label] = None
    return [
        Row(name, workers, ", ".join(systems), f"{mixed.gap:.2g}", _powers(mixed.constants), mixed.verdict)
        for (_, workers, mixed), (name, systems) in found.items()
    ]


def mixed_by(run: Finished) -> Mixed | None:
    """How a run's workers mix; None: they do not, or with a server."""
    return _mixed(**_options(run)) if run.on_graph else None


def steady_mixing(run: Finished) -> Mixing:
    """A run's mixing without failures; a ring, which is a circle, where there is none."""
    options = _options(run) if run.on_graph else {"graph": "ring", "num_workers": run.options["workers"]}
    return build_mixing(**{**options, "link_failure": 0.0, "worker_failure": 0.0}, allow_row_stochastic=True)


@cache
def _mixed(**options: Any) -> Mixed:
    return describe(build_mixing(**options, allow_row_stochastic=True))


def _options(run: Finished) -> dict[str, Any]:
    options = run.options
    return {
        "graph": options["graph"],
        "num_workers": options["workers"],
        "weights": options.get("weights") or "metropolis",
        "redraw": bool(options.get("redraw")),
        "link_failure": options.get("link_failure", 0.0),
        "worker_failure": options.get("worker_failure", 0.0),
        "seed": run.seed,
    }


def _name(run: Finished) -> str:
    """A run's graph and what else makes its mixing."""
    options = _options(run)
    usual = {"weights": "metropolis", "redraw": False, "link_failure": 0.0, "worker_failure": 0.0}
    return ", ".join(
        [shown(options["graph"]), *(f"{words(n)} {shown(options[n])}" for n in usual if options[n] != usual[n])]
    )


def _powers(constants: TheoremConstants | None) -> tuple[str, ...]:
    return () if constants is None else tuple(f"{power:.1f}".replace("-", "−") for power in astuple(constants))
