"""Experiment: what is computed, hashed into the run id. Runtime: where and how, never hashed."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.algorithms import Algorithm, Join, find_algorithm, get_algorithm, registered
from manyheads.algorithms.base import epochs_by_steps
from manyheads.algorithms.checking import check_class, making, prepared_net
from manyheads.algorithms.deprl import DePRL
from manyheads.by_name import check_name, find_function
from manyheads.checks import field_kinds, normalise_fields, not_negative, positive, shown
from manyheads.data import Dataset, is_brought_by_workers
from manyheads.data.evaluation_split import TestSplit
from manyheads.data.partition import parse_split
from manyheads.engine.phase import EngineName, Loss, PrecisionName
from manyheads.engine.workload import Transform
from manyheads.errors import UserError, flag, unknown, user_code
from manyheads.identity import described_options
from manyheads.models import Split, build
from manyheads.models.registry import Norm
from manyheads.randomness import every_seed, key
from manyheads.recipes import Recipe, step_seconds
from manyheads.topology import is_graph, parse_graph

_OURS = "give an experiment.json that manyheads wrote."
FUNCTIONS = ("loss", "metric", "transform")
"""Fields of an experiment that may be functions of the user's own."""
_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 1e8
"""Seconds that torch's timers can count."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run's numbers. None means: take the value from the data set's recipe."""

    algorithm: Algorithm = field(default_factory=DePRL)
    data: str | Dataset = "digits"
    """Data set: digits, cifar10, cifar100, fashion-mnist, harbox, mobiact, or the path of your own arrays (npz); all
    but digits and your own also with :raw, for inputs that are not standardised."""
    model: str | nn.Module | Callable[..., nn.Module] | None = None
    """Net: mlp or mlp:200,100, cnn, dnn, dnn-code, alexnet, alexnet-code, vgg11, vgg11-code, resnet18, or
    package.module:factory."""
    head: str | None = None
    """Name of the module the head begins with; 'all' or 'none'. Default: the last layer."""
    norm: Norm = "shared"
    """BatchNorm: statistics shared with the representation, kept local, or replaced by GroupNorm."""
    loss: str | Loss | None = None
    """Loss of your own, package.module:function: (output, target) -> loss of every sample. Default: cross entropy."""
    metric: str | Loss | None = None
    """Score of your own, in the same way; higher is better. Default: accuracy, or minus a regression's loss."""
    transform: str | Transform | None = None
    """Augmentation of your own, package.module:function: (inputs, numpy generator) -> inputs."""
    workers: int = 16
    """Number of workers."""
    split: str | None = None
    """Who holds what: dirichlet:A, iid, shards:K or natural. Default: dirichlet:0.3 (natural for data by worker)."""
    test_split: TestSplit = "shared"
    """Test shards: disjoint in the train split's proportions, overlapping, or the whole test pool reweighted."""
    relabel: bool = False
    """Every worker names the classes in its own order."""
    validation: float = 0.1
    """Fraction of each train shard held out for validation."""
    graph: str = "ring"
    """ring, random:P, full, torus, exponential, regular:D, star, one-peer-exponential, in-neighbours:K, links:I-J..."""
    weights: Literal["metropolis", "uniform", "max-degree", "lazy"] | None = None
    """Mixing weights. Default: metropolis (uniform for algorithms that say so)."""
    redraw: bool = False
    """Draw a random graph anew each round."""
    link_failure: float = 0.0
    """Chance that a link fails in a round."""
    worker_failure: float = 0.0
    """Chance that a worker is absent from a round."""
    rounds: int | None = None
    """Number of rounds."""
    seed: int = 1
    """Seed of everything random."""
    batch_size: int | None = None
    """Samples in a mini-batch."""
    lr: float | None = None
    """Learning rate of the representation and of whole models."""
    head_lr: float | None = None
    """Learning rate of heads trained by themselves, including those of workers that join a run."""
    momentum: float | None = None
    """Momentum, reset in every phase."""
    weight_decay: float | None = None
    """Weight decay."""
    clip: float | None = None
    """Largest gradient norm; 0 turns clipping off."""
    decay: float | None = None
    """Factor that the rates are multiplied by after each round."""
    schedule: Literal["decay", "corollary"] = "decay"
    """Rates: lr * decay**round, or Corollary 1's sqrt(N/K) and 1/(tau sqrt(K))."""
    precision: PrecisionName | None = None
    """Number format of the training; samples stay in float32. Default: tf32 on a GPU, else float32."""
    step_seconds: float | None = None
    """Simulated seconds per mini-batch of a worker. Default: what one core takes; for a net of your own a guess, which
    manyheads inspect speed replaces by a measurement."""
    link_latency: float = 0.01
    """Simulated seconds that every message takes, however short."""
    link_bandwidth: float = 12.5e6
    """Simulated bytes per second on a worker's link, and on the server's."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        normalise_fields(self)
        for name in FUNCTIONS:
            if isinstance(value := getattr(self, name), str):
                check_name(flag(name), value)
        positive(self, "workers", "rounds", "batch_size", "lr", "head_lr", "decay", "link_bandwidth")
        not_negative(self, "weight_decay", "clip", "seed", "step_seconds", "link_latency")
        if self.decay is not None and self.decay > 1:
            raise UserError(f"--decay {self.decay:g} lets the rates grow in every round: give a factor of at most 1.")
        for name in ("lr", "head_lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and value > torch.finfo(self.dtype).max:
                raise UserError(f"{flag(name)} {value:g} is more than float32 holds: give less.")
        if self.workers < 2 and self.algorithm.exchange != "none":
            raise UserError("--workers 1: a run needs at least 2 workers, who learn from each other.")
        if self.weights is not None and is_graph(self.graph) and parse_graph(self.graph).weighted:
            raise UserError(
                f"--weights {self.weights} does not go with a --graph whose links have weights: leave one out."
            )
        for name in ("momentum", "validation", "link_failure", "worker_failure"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"{flag(name)} {value} is outside [0, 1): give 0, or a fraction below 1.")

    def complete(self, recipe: Recipe) -> "Experiment":
        """The experiment with every open value filled in from a recipe, and the split in its canonical form."""
        missing = {name: value for name, value in asdict(recipe).items() if getattr(self, name) is None}
        split = self.split or ("natural" if is_brought_by_workers(self.data) else "dirichlet:0.3")
        full = replace(self, split=str(parse_split(split)), **missing)
        if full.step_seconds is None:
            full = replace(full, step_seconds=step_seconds(full.recipe.model, full.recipe.batch_size))
        return full

    @property
    def recipe(self) -> Recipe:
        """What a complete experiment is trained with: the values that may be None before it is complete."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(Recipe)}
        assert None not in values.values(), "an experiment is completed before it is used"
        return Recipe(**values)

    def own(self, name: str) -> Callable[..., Tensor] | None:
        """One of ``FUNCTIONS``, found by its name if that was given; None: there is none."""
        given = getattr(self, name)
        return find_function(flag(name), given) if isinstance(given, str) else given

    @property
    def root(self) -> int:
        """The number that everything random is drawn from: the seed, or one made from it for this algorithm."""
        stream = self.algorithm.stream
        return key(self.seed, stream) % 2**31 if stream else self.seed

    def describe(self) -> dict[str, Any]:
        """Every field as JSON can hold it: functions by name, other objects by kind and a hash of their content."""
        own = {"name": self.algorithm.name, **_described_options(self.algorithm)}
        others = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "algorithm"}
        return {"algorithm": own, **described_options(others)}

    def to_json(self) -> str:
        """Canonical: the same experiment gives the same text."""
        return json.dumps(self.describe(), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, **objects: Any) -> "Experiment":
        """An experiment from its text.

        What the text can only describe (a module, arrays, a loss, an unregistered algorithm) is given by name. The
        options of a given algorithm are replaced by those of the text.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not an experiment, as it is no JSON ({error}): {_OURS}") from None
        options = values.pop("algorithm", None) if isinstance(values, dict) else None
        if not isinstance(options, dict) or not isinstance(options.get("name"), str):
            raise UserError(f"not an experiment, as it names no algorithm: {_OURS}")
        algorithm = _read_algorithm(options, objects.pop("algorithm", None))
        allowed = {spec.name for spec in fields(Experiment)} - {"algorithm"}
        for name in (*values, *objects):
            if name not in allowed:
                raise unknown("experiment field", name, allowed)
        for name, value in list(values.items()):
            if name in objects:
                values[name] = objects[name]
            elif isinstance(value, dict):
                what = value.get("kind", "an object")
                give = f"give it in Python, as Run.open(path, {name}=...)"
                if name in FUNCTIONS:
                    give = f"{give}, or, with --from, name it, as {flag(name)} package.module:function"
                raise UserError(f"the experiment's {name} is {what}, which cannot be read from a file: {give}.")
        return Experiment(algorithm=algorithm, **values)

    @cached_property
    def run_id(self) -> str:
        """Twelve letters that stand for the experiment; rounds are left out, so that a run can be extended.

        Of its objects as they were when it was first asked for: to hash a large net takes a while.
        """
        values = self.describe()
        if not self.uses_rounds:
            del values["rounds"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def uses_rounds(self) -> bool:
        """Whether its numbers depend on how many rounds there are, so that a run cannot be extended."""
        return self.algorithm.uses_rounds or self.schedule == "corollary"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are kept and mixed."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def build_net(
        self, input_shape: tuple[int, ...], num_outputs: int, *, seed: int, example: Tensor | None = None
    ) -> Split:
        """The net that the algorithm trains on samples [*input_shape], its weights a function of the seed.

        It is tried on ``example``, some samples [B, ...]; without any it is taken as one that has been tried before.
        """
        with every_seed(seed):
            net = build(self.recipe.model, input_shape, num_outputs, head=self.head, norm=self.norm, example=example)
        # Not by net.to(dtype), which would reduce complex weights to their real part.
        return prepared_net(self.algorithm, net.double() if self.dtype == torch.float64 else net.float())


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how a run is computed. None of it changes what is computed."""

    out: Path | None = None
    """Run directory. Default: runs/DATA-ALGORITHM-ID on the command line; in Python nothing is kept."""
    resume: bool = False
    """Require that the run directory already exists."""
    data_dir: Path | None = None
    """Folder of the data sets."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto."""
    engine: EngineName = "auto"
    """Workers one after the other (loop), stacked (batched), in recorded steps on a GPU, or the fastest of them."""
    threads: int | None = None
    """Threads; default: one per core."""
    eval_every: int = 1
    """Evaluate every so many rounds, and at the end."""
    theory_every: int = 0
    """Measure the terms of the paper's M(k) every so many rounds, and at the end; 0: never."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints; default: as often as fits into 5 % of the time."""
    deterministic: bool = False
    """Bit-exact kernels on a GPU."""
    timeout: float = 60.0
    """With several processes: seconds that one waits for another."""
    site_timeout: float = 3600.0
    """Seconds that the other sites go on while one is away."""

    def __post_init__(self) -> None:
        normalise_fields(self)
        not_negative(self, "theory_every")
        positive(self, "eval_every", "checkpoint_every", "threads", "timeout", "site_timeout")
        if not _SHORTEST_WAIT <= self.timeout <= _LONGEST_WAIT:
            bounds = f"{_SHORTEST_WAIT:g} to {_LONGEST_WAIT:g} seconds"
            raise UserError(f"--timeout {self.timeout:g} is out of range: give {bounds}.")


def option_defaults(algorithm: type[Algorithm]) -> dict[str, Any]:
    """An algorithm's own options and their defaults."""
    return {spec.name: spec.default for spec in fields(algorithm)}


def flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description as one table: the algorithm by its name, its own options beside the others."""
    values = dict(description)
    own = dict(values.pop("algorithm"))
    return {"algorithm": own.pop("name"), **own, **values}


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose class or options make no sense."""
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm {shown(algorithm)} is not an algorithm object: give one such as DePRL().")
    check_class(algorithm, taken={spec.name for owner in (Experiment, Runtime) for spec in fields(owner)})
    kind = type(algorithm)
    if find_algorithm(algorithm.name) not in (None, kind):
        # Otherwise its runs could be taken for the other's.
        raise UserError(f"{kind.__name__} has the name of another algorithm, '{algorithm.name}': give it its own.")
    for other in (*registered().values(), Join):
        # As inherited from another: in tables and pictures nobody could tell the two apart.
        if other.title == algorithm.title and other.name != algorithm.name:
            raise UserError(f"{kind.__name__} has the title of {other.name}, '{other.title}': give it its own.")
    # Again, as a user's own algorithm may have a __post_init__ that does not call the base's.
    normalise_fields(algorithm)
    values, defaults = {name: getattr(algorithm, name) for name in field_kinds(kind)}, option_defaults(kind)
    not_negative(algorithm, *(name for name, value in values.items() if isinstance(value, (int, float))))
    work = []
    for steps, epochs in epochs_by_steps(values).items():
        if values[steps] is not None and values[epochs] != defaults[epochs]:
            raise UserError(f"{flag(epochs)} and {flag(steps)} exclude each other: give one.")
        work.append(epochs if values[steps] is None else steps)
    if work and not any(values[name] for name in work):
        raise UserError(f"{' and '.join(f'{flag(name)} 0' for name in work)} would train nothing: give more.")


def _described_options(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's options as JSON can hold them; those that are dataclasses by their fields."""
    with user_code(f"to describe the options of {algorithm.name}"):
        return described_options(asdict(algorithm))


def _read_algorithm(options: dict[str, Any], given: Algorithm | None) -> Algorithm:
    """The algorithm of an experiment.json: a registered one, or the one given, with the options of the text."""
    name = options.pop("name")
    if given is not None:
        check_algorithm(given)
        if given.name != name:
            raise UserError(f"this is an experiment with '{name}', not with '{given.name}': give that algorithm.")
        kind, as_text = type(given), json.loads(json.dumps(_described_options(given)))
        # An option that is the same as text keeps the given value: JSON cannot tell a tuple from a list.
        options |= {same: getattr(given, same) for same in as_text.keys() & options if as_text[same] == options[same]}
        for option, value in options.items():
            if isinstance(value, dict) and "kind" in value and value != getattr(given, option, None):
                raise UserError(
                    f"the run's {option} is {value['kind']}, which cannot be read from a file: give an algorithm"
                    " with it."
                )
    else:
        kind = get_algorithm(name)
    known = field_kinds(kind)
    for name in options:
        if name not in known:
            raise unknown(f"option of {kind.name}", name, known)
    with making(kind, options):
        return kind(**options)
