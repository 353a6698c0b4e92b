"""What an experiment is: checked at the door, written down completely, known by its id."""

import json
import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Optional

import numpy as np
import pytest
import torch

from manyheads.algorithms import DPSGD, REGISTRY, DePRL, DisPFL, Ditto, FedAvg
from manyheads.errors import UserError, flag
from manyheads.experiment import Experiment, Runtime, option_defaults
from manyheads.recipes import RECIPES


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"workers": -3}, "--workers -3"),
        ({"workers": 1}, "--workers 1"),
        ({"rounds": 0}, "--rounds 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"head_lr": -1.0}, "--head-lr -1.0"),
        ({"decay": 0.0}, "--decay 0.0"),
        ({"decay": 1.1}, "--decay 1.1"),
        ({"momentum": -0.1}, "--momentum -0.1"),
        ({"momentum": 1.0}, "--momentum 1.0"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1"),
        ({"weight_decay": 1e39}, "--weight-decay 1e+39 is more than float32 holds"),
        ({"lr": 1e39, "precision": "bf16"}, "--lr 1e+39 is more than float32 holds"),
        ({"clip": -1.0}, "--clip -1.0"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**63}, "--seed 9223372036854775808 is too large"),
        ({"workers": 2**63}, "--workers 9223372036854775808 is too large"),
        ({"validation": 1.0}, "--validation 1.0"),
        ({"validation": -0.1}, "--validation -0.1"),
        ({"link_failure": 1.0}, "--link-failure 1.0"),
        ({"worker_failure": 2.0}, "--worker-failure 2.0"),
        ({"precision": "float16"}, "'float16'"),
        ({"norm": "batch"}, "'batch'"),
        ({"weights": "metropoli"}, "Did you mean 'metropolis'"),
        ({"test_split": "sharde"}, "Did you mean 'shared'"),
        ({"schedule": "cosine"}, "'cosine'"),
        ({"algorithm": "deprl"}, "give one such as DePRL()"),
        ({"algorithm": DePRL}, "give one such as DePRL()"),
        ({"algorithm": DePRL(head_epochs=-1)}, "--head-epochs -1"),
        ({"algorithm": DePRL(head_epochs=5, head_steps=2)}, "--head-epochs and --head-steps exclude each other"),
        (
            {"graph": "links:0-1=0.5", "weights": "lazy"},
            "--weights lazy does not go with a --graph whose links have weights",
        ),
        ({"algorithm": DPSGD(epochs=1, steps=1)}, "--epochs and --steps exclude each other"),
        ({"algorithm": Ditto(lam=-1.0)}, "--lam -1.0"),
        ({"algorithm": DPSGD(steps=0)}, "--steps 0 would train nothing: give more."),
        ({"algorithm": DePRL(head_steps=0, body_epochs=0)}, "--head-steps 0 and --body-epochs 0 would train nothing"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, said):
    with pytest.raises(UserError) as error:
        Experiment(**values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (DePRL, {"order": "mix-trian"}, "Did you mean 'mix-train'"),
        (DePRL, {"head_epochs": "two"}, "--head-epochs 'two' is of the wrong type: give int"),
        (FedAvg, {"weighting": "sample"}, "Did you mean 'samples'"),
        (FedAvg, {"participation": "half"}, "--participation 'half' is of the wrong type: give float"),
        (DisPFL, {"density": None}, "--density None is of the wrong type: give float"),
    ],
)
def test_an_algorithm_refuses_what_is_no_option_when_it_is_made(kind, options, said):
    with pytest.raises(UserError) as error:
        kind(**options)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["eval_every", "checkpoint_every", "threads", "timeout"])
def test_a_runtime_takes_positive_numbers(name):
    with pytest.raises(UserError, match="not positive"):
        Runtime(**{name: 0})


@pytest.mark.parametrize("name", ["out", "data_dir"])
def test_a_runtime_takes_paths_as_words_too(name):
    assert getattr(Runtime(**{name: "runs/mine"}), name) == Path("runs/mine")  # pyright: ignore[reportArgumentType]


def test_an_experiment_takes_the_path_of_its_data():
    given = Experiment(data=Path("some/my.npz"))  # pyright: ignore[reportArgumentType]
    assert given == Experiment(data="some/my.npz") and isinstance(given.data, str)
    with pytest.raises(UserError, match="--workers"):
        Experiment(workers=Path("4"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        (Experiment, "data", (1, 2), "give str or a Dataset, which from_arrays makes"),
        (Experiment, "model", 3, "str or an nn.Module or a function"),
        (Experiment, "loss", 3, "a function"),
        (Experiment, "transform", "flip", "--transform 'flip' is not package.module:function"),
        (Experiment, "norm", 3, "unknown"),
        (Experiment, "norm", None, "unknown --norm 'None'"),
        (Experiment, "workers", np.float64(4.0), "int"),
        (Runtime, "out", 3, "Path"),
        (Runtime, "data_dir", b"x", "Path"),
        (Runtime, "threads", "2", "int"),
        (Runtime, "eval_every", None, "int"),
        (Runtime, "timeout", "60", "float"),
        (Runtime, "deterministic", 1, "bool"),
        (Runtime, "device", torch.device("cpu"), "str"),
    ],
)
def test_values_of_the_wrong_type_are_refused_in_one_line(kind, name, value, wanted):
    with pytest.raises(UserError, match=wanted) as error:
        kind(**{name: value})
    assert flag(name) in str(error.value) and "\n" not in str(error.value)


def test_equal_numbers_make_equal_experiments_with_one_id():
    plain = Experiment(algorithm=Ditto(lam=2.0, epochs=4), workers=4, lr=1.0, relabel=True)
    whole = Experiment(algorithm=Ditto(lam=2, epochs=4), workers=4, lr=1, relabel=True)
    of_numpy = Experiment(
        algorithm=Ditto(lam=np.float32(2), epochs=np.int64(4)),  # pyright: ignore[reportArgumentType]
        workers=np.int64(4),  # pyright: ignore[reportArgumentType]
        lr=np.float32(1),  # pyright: ignore[reportArgumentType]
        relabel=np.bool_(True),  # pyright: ignore[reportArgumentType]
    )
    assert plain == whole == of_numpy
    assert plain.to_json() == whole.to_json() == of_numpy.to_json()
    assert plain.run_id == whole.run_id == of_numpy.run_id
    assert Runtime(threads=np.int32(2)).threads == 2  # pyright: ignore[reportArgumentType]


def test_a_complete_experiment_has_a_recipe_of_its_own():
    recipe = RECIPES["digits"]
    assert Experiment().complete(recipe).recipe == recipe
    assert Experiment(lr=0.5, clip=0.0).complete(recipe).recipe == replace(recipe, lr=0.5, clip=0.0)
    with pytest.raises(AssertionError, match="completed before it is used"):
        _ = Experiment(lr=0.5).recipe


def test_the_text_is_complete_and_canonical():
    experiment = Experiment(algorithm=DisPFL(density=0.2), workers=7, graph="random:0.4", lr=0.25, relabel=True)
    values = json.loads(experiment.to_json())
    assert set(values) == {field.name for field in fields(Experiment)}
    assert values["algorithm"] == {"name": "dispfl", **option_defaults(DisPFL), "density": 0.2}
    assert Experiment.from_json(experiment.to_json()) == experiment
    shuffled = json.dumps(dict(sorted(values.items(), reverse=True)))
    assert Experiment.from_json(shuffled).to_json() == experiment.to_json()


@dataclass(frozen=True, kw_only=True)
class Written(DePRL):
    """As in a module with ``from __future__ import annotations``, in the words of older Pythons too."""

    every: "Optional[int]" = None  # noqa: UP045
    what: "Any" = None

    name: ClassVar[str] = "written"
    title: ClassVar[str] = "Written"


def test_the_options_of_an_algorithm_of_ones_own_may_be_typed_in_any_way():
    assert Experiment(algorithm=Written(every=2, what="x")).describe()["algorithm"]["every"] == 2
    with pytest.raises(UserError, match=r"--every 'x' is of the wrong type: give int"):
        Experiment(algorithm=Written(every="x"))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Given(DPSGD):
    """With an option that may be anything."""

    name: ClassVar[str] = "given"
    title: ClassVar[str] = "Given"
    what: Any = None


@pytest.mark.parametrize("what", [torch.ones(2), {"a": (1, 2)}, np.float32, {3, 4}, Path("x"), Ditto(), [1.5, None]])
def test_the_options_of_an_algorithm_of_ones_own_may_be_no_json(lab, what):
    experiment = lab.tiny(Given(what=what))
    read = Experiment.from_json(experiment.to_json(), data=experiment.data, algorithm=Given(what=what))
    assert read.run_id == experiment.run_id != lab.tiny(Given(what=torch.zeros(2))).run_id
    assert read.algorithm.what is what
    if "kind" in str(experiment.describe()["algorithm"]["what"]):
        with pytest.raises(
            UserError, match=r"the run's what is .*, which cannot be read from a file: give an algorithm"
        ):
            Experiment.from_json(experiment.to_json(), data=experiment.data, algorithm=Given())


@pytest.mark.parametrize("what", [object(), Lock()])
def test_options_that_tell_nothing_are_refused_before_the_first_round(lab, what):
    with pytest.raises(
        UserError,
        match=r"^what: runs cannot be told apart by an object of type object|to describe the options of given fails",
    ):
        lab.opened(lab.tiny(Given(what=what)))


def test_an_algorithm_of_ones_own_has_a_name_of_its_own():
    class Variant(DePRL):
        pass

    with pytest.raises(UserError, match="Variant has the name of another algorithm, 'deprl'"):
        Experiment(algorithm=Variant())


@pytest.mark.parametrize(("base", "title"), [(DePRL, "DePRL"), (DPSGD, "New workers")])
def test_an_algorithm_of_ones_own_has_a_title_of_its_own(monkeypatch, base, title):
    """Two rows of a table, and two curves, would be called the same."""

    def made(**held):
        return dataclass(frozen=True, kw_only=True)(type("Variant", (base,), {"name": "variant", **held}))

    taken = "join" if title == "New workers" else "deprl"
    with pytest.raises(UserError, match=rf"^Variant has the title of {taken}, '{title}': give it its own\.$"):
        Experiment(algorithm=made(title=title)())
    kind = made(title="Variant")
    for name in ("variant", "alias"):
        monkeypatch.setitem(REGISTRY, name, kind)
        assert Experiment(algorithm=kind()).algorithm == kind(), "it does not clash with itself"
    with pytest.raises(UserError, match=r"^Another has the title of variant, 'Variant': give it its own\.$"):
        Experiment(algorithm=type("Another", (kind,), {"name": "another"})())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            "not an experiment, as it is no JSON (Expecting value: line 1 column 1 (char 0)): give an experiment.json",
        ),
        pytest.param("[" * 100_000, "not an experiment, as it is no JSON (", id="deep"),
        *(
            (text, "not an experiment, as it names no algorithm: give an experiment.json that manyheads wrote.")
            for text in ("[1, 2]", "null", "{}", '{"algorithm": 3}', '{"algorithm": {}}', '{"algorithm": {"name": []}}')
        ),
        ('{"algorithm": {"name": "fedavg", "participation": "half"}}', "--participation 'half' is of the wrong type"),
        ('{"algorithm": {"name": "local"}, "model": {"size": 3}}', "model is an object"),
        ('{"algorithm": {"name": "deprll"}}', "Did you mean 'deprl'"),
        ('{"algorithm": {"name": "deprl", "head_epoch": 2}}', "Did you mean 'head_epochs'"),
        ('{"algorithm": {"name": "deprl"}, "worker": 3}', "Did you mean 'workers'"),
        ('{"algorithm": {"name": "deprl"}, "workers": "three"}', "workers"),
        ('{"algorithm": {"name": "deprl", "head_epochs": "two"}}', "head-epochs"),
        ('{"algorithm": {"name": "deprl"}, "workers": 0}', "--workers 0"),
    ],
)
def test_other_texts_are_refused_in_one_line(text, said):
    with pytest.raises(UserError) as error:
        Experiment.from_json(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_id_is_of_everything_that_decides_the_numbers():
    base = Experiment()
    changes = {
        "algorithm": DePRL(head_epochs=3),
        "data": "cifar10",
        "model": "cnn",
        "head": "fc1",
        "norm": "local",
        "workers": 15,
        "split": "iid",
        "test_split": "overlap",
        "relabel": True,
        "validation": 0.2,
        "graph": "full",
        "weights": "lazy",
        "redraw": True,
        "link_failure": 0.1,
        "worker_failure": 0.1,
        "seed": 2,
        "batch_size": 3,
        "lr": 0.5,
        "head_lr": 0.5,
        "momentum": 0.5,
        "weight_decay": 0.5,
        "clip": 0.5,
        "decay": 0.5,
        "schedule": "corollary",
        "precision": "float64",
        "step_seconds": 1.0,
        "link_latency": 1.0,
        "link_bandwidth": 1.0,
        "loss": torch.nn.functional.mse_loss,
        "metric": torch.nn.functional.mse_loss,
        "transform": torch.nn.functional.dropout,
    }
    assert set(changes) == {field.name for field in fields(Experiment)} - {"rounds"}
    ids = {replace(base, **{name: value}).run_id for name, value in changes.items()}
    assert len(ids | {base.run_id}) == len(changes) + 1
    assert all(len(one) == 12 for one in ids)


def test_rounds_are_in_the_id_only_where_they_matter():
    def ids(**values) -> set[str]:
        return {Experiment(rounds=rounds, **values).run_id for rounds in (5, 10)}

    assert len(ids()) == 1
    assert len(ids(algorithm=DisPFL())) == 2
    assert len(ids(schedule="corollary")) == 2


def test_the_id_is_computed_once_and_goes_along(monkeypatch: pytest.MonkeyPatch):
    experiment, same = (Experiment(model="mlp:4", lr=0.5) for _ in range(2))
    first = experiment.run_id
    assert experiment == same and hash(experiment) == hash(same)
    assert replace(experiment, lr=0.25).run_id != first
    sent = pickle.loads(pickle.dumps(experiment))
    assert sent == experiment and replace(sent).run_id == first
    monkeypatch.delattr(Experiment, "describe")
    assert experiment.run_id == sent.run_id == first


def test_the_runtime_is_no_part_of_the_id():
    assert not {field.name for field in fields(Runtime)} & {field.name for field in fields(Experiment)}
    assert Runtime(out=Path("somewhere")).eval_every == 1


def test_precision():
    assert Experiment(precision="float64").dtype == torch.float64
    assert {Experiment(precision=name).dtype for name in ("float32", "tf32", "bf16")} == {torch.float32}


def test_passes_that_are_not_all_the_work_may_be_none():
    @dataclass(frozen=True, kw_only=True)
    class Warm(DPSGD):
        warmup_epochs: int = 2
        name: ClassVar[str] = "warm"
        title: ClassVar[str] = "Warm"

    assert Experiment(algorithm=Warm(warmup_epochs=0)).algorithm == Warm(warmup_epochs=0)
    with pytest.raises(UserError, match=r"^--epochs 0 would train nothing: give more\.$"):
        Experiment(algorithm=Warm(epochs=0))


def test_names_that_are_no_text_are_refused():
    """As a shell gives bytes that are no UTF-8."""
    with pytest.raises(UserError, match=r"^--out 'runs/\\udcff' is not valid UTF-8: give it another name"):
        Runtime(out=Path("runs/\udcff"))
    with pytest.raises(UserError, match=r"^--data "):
        Experiment(data="\udcff.npz")
    with pytest.raises(UserError, match=r"^--data 'a\\x00\.npz' holds a zero byte: give it another name\.$"):
        Experiment(data="a\0.npz")


@pytest.mark.parametrize("seconds", [1e-9, 1e10, 1e30])
def test_a_wait_that_no_timer_counts_is_refused(seconds: float) -> None:
    with pytest.raises(UserError, match=r"--timeout .*: give 0\.1 to 1e\+08 seconds"):
        Runtime(timeout=seconds)
