"""The algorithms, one short file each, and their registry."""

from collections.abc import Mapping
from typing import Any

from manyheads.algorithms.base import Algorithm, Context, State
from manyheads.algorithms.checking import making
from manyheads.algorithms.d_psgd import DPSGD
from manyheads.algorithms.deprl import DePRL
from manyheads.algorithms.dispfl import DisPFL
from manyheads.algorithms.ditto import Ditto
from manyheads.algorithms.fedavg import FedAvg
from manyheads.algorithms.fedrep import FedRep
from manyheads.algorithms.fedrod import FedRoD
from manyheads.algorithms.join import Join
from manyheads.algorithms.local import Local
from manyheads.checks import shown
from manyheads.errors import UserError, unknown

REGISTRY: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (DePRL, DPSGD, DisPFL, FedAvg, FedRep, Ditto, FedRoD, Local)
}
"""Every algorithm by name. Command line, files, contract tests and the distributed test follow from it."""


def registered() -> dict[str, type[Algorithm]]:
    """The registry, in which the user's own may be: what is no class is refused."""
    for name, kind in REGISTRY.items():
        given: object = kind
        if not (isinstance(given, type) and issubclass(given, Algorithm)):
            raise UserError(
                f"REGISTRY['{name}'] is {shown(given)}, which is no class of an algorithm: register the class itself,"
                " as in REGISTRY[DePRL.name] = DePRL."
            )
    return REGISTRY


def find_algorithm(name: str) -> type[Algorithm] | None:
    """The algorithm called ``name`` in an experiment on disk: a registered one, or Join for runs of new workers.

    None: a user's own that is not registered.
    """
    return Join if name == Join.name else registered().get(name)


def get_algorithm(name: str) -> type[Algorithm]:
    """The same; an unknown name is an error."""
    found = find_algorithm(name)
    if found is None:
        raise unknown_algorithm(name)
    return found


def unknown_algorithm(name: str) -> UserError:
    """The error for a name that is not in the registry, with what to do if it is that of one's own."""
    own = "For one of your own give this command through the file that registers it, as python FILE.py ..., or in"
    also = "Python the object, as in Run.open(path, algorithm=...)."
    return UserError(f"{unknown('algorithm', name, REGISTRY)} {own} {also}")


def attribute_of(name: str, options: Mapping[str, Any], about: str) -> Any:
    """An attribute of the algorithm called ``name`` with the options of a run; None: the algorithm is not known.

    It is read from the class if it does not depend on the options: an old run may have options that no longer exist.
    """
    found = find_algorithm(name)
    said = None if found is None else getattr(found, about)
    if found is None or not isinstance(said, property):
        return said
    known = {option: value for option, value in options.items() if option in found.__dataclass_fields__}
    with making(found, known):
        return getattr(found(**known), about)


def title_of(name: str) -> str:
    """What people call the algorithm called ``name``."""
    found = find_algorithm(name)
    return name if found is None else found.title


__all__ = [
    "DPSGD",
    "REGISTRY",
    "Algorithm",
    "Context",
    "DePRL",
    "DisPFL",
    "Ditto",
    "FedAvg",
    "FedRep",
    "FedRoD",
    "Join",
    "Local",
    "State",
    "attribute_of",
    "find_algorithm",
    "get_algorithm",
    "registered",
    "title_of",
    "unknown_algorithm",
]
