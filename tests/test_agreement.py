"""What processes compare before they begin; how those that differ end is in ``network/test_failures``."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from manyheads.agreement import check_alike, check_same_code, check_same_weights, meet_sites
from manyheads.algorithms import DePRL
from manyheads.errors import UserError
from manyheads.experiment import Runtime
from manyheads.own_code import hashes
from manyheads.units import numbered

_called = partial(numbered, "process")


def _two(says: Callable[[str], str]) -> Any:
    """The first of two processes; the second says something, as JSON, that depends on what it does."""

    def gather_json(own: Any) -> list[Any]:
        text = json.dumps(own)
        return [json.loads(text), json.loads(says(text))]

    return SimpleNamespace(gather_json=gather_json, called=_called)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0.0"])
def test_weights_are_compared_whatever_numbers_they_are(lab, value):
    held = nn.Linear(6, 5).requires_grad_(False)
    held.bias.fill_(float(value))
    model = lab.opened(lab.tiny(DePRL(), model=nn.Sequential(held, nn.ReLU(), nn.Linear(5, 3)))).ctx.model
    check_same_weights(_two(lambda own: own), model)
    with pytest.raises(UserError, match=r"the net of process 1 .* process 0 \(representation.0.bias differs\)"):
        check_same_weights(_two(lambda own: own.replace(value, "1.0")), model)


def test_the_same_rows_in_another_order_are_other_weights(lab):
    held = nn.Linear(6, 5).requires_grad_(False)
    net = nn.Sequential(held, nn.ReLU(), nn.Linear(5, 3))

    def said() -> list[str]:
        model = lab.opened(lab.tiny(DePRL(), model=net)).ctx.model
        texts: list[str] = []
        check_same_weights(_two(lambda own: texts.append(own) or own), model)
        return texts

    first = said()
    assert said() == first
    held.weight.copy_(held.weight.flip(0))
    assert said() != first, "as of an embedding with another site's vocabulary"


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("rounds", 2, 3),
        ("head_epochs", 2, 3),
        ("engine", "auto", "loop"),
        ("eval_every", "1", "2"),
        ("theory_every", "0", "1"),
        ("checkpoint_every", "None", "5"),
        ("deterministic", "False", "True"),
        ("out", "None", "run"),
    ],
)
def test_every_option_is_compared(lab, name, own, other):
    experiment = lab.tiny(DePRL())
    two = _two(lambda text: json.dumps({**json.loads(text), name: other}))
    with pytest.raises(UserError, match=f"process 1 was started with {name} {other}, process 0 with {name} {own}: "):
        check_alike(two, experiment, Runtime(), experiment.data, in_sites=False)


def test_of_another_graph_of_the_users_own_the_first_links_are_named(lab):
    experiment = lab.tiny(DePRL())
    other = f"links:{','.join(f'0-{i}' for i in range(1, 999))}"
    two = _two(lambda text: json.dumps({**json.loads(text), "graph": other}))
    with pytest.raises(UserError, match=r"with graph links:0-1,0-2,0-3,0-4,\.\.\. \(998, .*with graph ring: give "):
        check_alike(two, experiment, Runtime(), experiment.data, in_sites=False)


def test_versions_are_compared(lab):
    experiment = lab.tiny(DePRL())
    with pytest.raises(UserError, match=r"process 1 was started with version 0.* process 0 with version .* with torch"):
        check_alike(
            _two(lambda own: own.replace("with torch", "")), experiment, Runtime(), experiment.data, in_sites=False
        )


def test_processes_that_hold_different_arrays_are_told_of_sites(lab):
    """As where each gives ``from_workers`` its own part."""
    experiment = lab.tiny(DePRL())
    digest = experiment.data.digest()
    assert digest in experiment.to_json()
    with pytest.raises(UserError) as error:
        check_alike(
            _two(lambda own: own.replace(digest, "0" * 64)), experiment, Runtime(), experiment.data, in_sites=False
        )
    said = str(error.value)
    assert said.startswith("process 1 does not have the same data as process 0: give all processes the same data; to")
    assert "site-{worker}.npz" in said and "docs/sites.md" in said
    assert "sha256" not in said and "'" not in said.replace("worker's", "")


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def test_a_module_that_each_process_makes_for_itself(lab):
    """As in a script, which every process runs."""
    own, other = (lab.tiny(DePRL(), model=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))) for _ in range(2))
    known, its = (each.describe()["model"]["sha256"] for each in (own, other))
    with pytest.raises(UserError, match=r"process 1 does not have the same model as process 0: .* its class or a fac"):
        check_alike(_two(lambda text: text.replace(known, its)), own, Runtime(), own.data, in_sites=False)


def test_code_of_ones_own_is_compared(lab):
    """Each site may keep a copy of its own."""
    plain, own = lab.tiny(DePRL()), lab.tiny(DePRL(), loss=_squared)
    known = hashes(own)["loss"]
    check_same_code(_two(lambda said: said), plain)
    check_same_code(_two(lambda said: said), own)
    with pytest.raises(
        UserError, match="process 1 does not have the same code in its loss as process 0: give all of them"
    ):
        check_same_code(_two(lambda said: said.replace(known, "0" * 64)), own)


def _sites(count: int) -> Any:
    """Processes that are given the same data, and all see the files of the same four workers."""

    def gather_json(own: Any) -> list[Any]:
        return [own if isinstance(own, str) else dict.fromkeys("0123", "")] * count

    return SimpleNamespace(
        count=count,
        tells_why=True,
        whose=None,
        gather_json=gather_json,
        called=_called,
    )


@pytest.mark.parametrize("kind", ["overlap", "reweighted"])
def test_sites_do_not_deal_each_others_test_samples(lab, kind):
    """Among whom they are dealt would depend on how many processes share a site's workers."""
    experiment = lab.tiny(DePRL(), data="site-{worker}.npz", test_split=kind)
    with pytest.raises(UserError, match=f"--test-split {kind} deals everybody's test samples"):
        meet_sites(experiment, Runtime(), _sites(2))
    assert meet_sites(experiment, Runtime(), _sites(1)) is not None


def test_a_process_that_names_its_own_file_among_sites(lab):
    """It would take the others' list of files for their options, and they its options for files."""
    sites, own = "site-{worker}.npz", "site-1.npz"
    match = f"process 1 was started with data {own}, process 0 with data {sites}: give all of them the same options"
    with pytest.raises(UserError, match=match):
        meet_sites(lab.tiny(DePRL(), data=sites), Runtime(), _two(lambda said: said.replace(sites, own)))
    with pytest.raises(UserError, match=f"process 1 was started with data {sites}, process 0 with data {own}: "):
        meet_sites(lab.tiny(DePRL(), data=own), Runtime(), _two(lambda said: said.replace(own, sites)))


def test_a_run_after_one_over_sites_tells_what_went_wrong(lab):
    processes = _sites(2)
    meet_sites(lab.tiny(DePRL(), data="site-{worker}.npz"), Runtime(), processes)
    assert not processes.tells_why and len(processes.whose) == 2
    assert meet_sites(lab.tiny(DePRL()), Runtime(), processes) is None
    assert processes.tells_why and processes.whose is None
