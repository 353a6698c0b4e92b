"""What a run has left is read back, and what is damaged in it is left out or said."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from manyheads.algorithms import DePRL, DisPFL, Local
from manyheads.errors import UserError
from manyheads.experiment import Experiment
from manyheads.files import sha256
from manyheads.models import Split, build
from manyheads.rounds import run as rounds
from manyheads.rounds import train
from manyheads.store import Run, RunDirectory
from manyheads.tree import stack

ABOUT = {"input_shape": [6], "num_outputs": 3, "num_classes": 3, "pixels": None, "models_sha256": ""}
"""A model.json."""


def test_damaged_lines_are_skipped_and_counted(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    for round in (1, 2, 3):
        directory.append(shelf.record(round))
    for name, bad in (("metrics.jsonl", b"\xff\x00{"), ("workers.jsonl", b"[2]")):
        lines = (tmp_path / name).read_bytes().splitlines()
        (tmp_path / name).write_bytes(b"\n".join([lines[0], bad, lines[2], b""]))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(shelf.record(9, run_id="of another run").metrics()) + "\n")
    run = Run.open(tmp_path)
    assert shelf.rounds(run.metrics()) == shelf.rounds(run.workers()) == [1, 3]
    assert run.damaged_lines == 3
    run.metrics()
    assert run.damaged_lines == 3


def test_what_is_no_run_cannot_be_opened(shelf: SimpleNamespace, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with shelf.refused(path, "is not a run directory"):
            Run.open(path)


def test_a_folder_whose_name_is_no_text_cannot_be_opened(tmp_path: Path) -> None:
    """Neither safetensors nor a report could be told about it."""
    with pytest.raises(UserError, match=r"the folder '.*caf\\udce9' is not valid UTF-8: give it another name"):
        Run.open(tmp_path / "caf\udce9")


def test_a_run_is_shown_by_its_path(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path)
    assert repr(Run.open(tmp_path)) == f"Run.open('{tmp_path}')"


def test_the_folder_of_a_comparison_names_some_of_its_runs(shelf: SimpleNamespace, tmp_path: Path) -> None:
    for k in range(8):
        shelf.start(tmp_path / f"deprl-{k}")
    with shelf.refused(tmp_path, r": give one of those in it, deprl-0, .*, deprl-5 and 2 more\.$"):
        Run.open(tmp_path)


def test_the_folder_of_a_site_names_its_runs(shelf: SimpleNamespace, tmp_path: Path) -> None:
    for site in ("site-4", "site-0"):
        shelf.start(tmp_path / site)
    with shelf.refused(tmp_path, "is not a run directory .*: give one of those in it, site-0, site-4"):
        Run.open(tmp_path)


def test_the_state_is_that_of_the_newest_checkpoint_and_of_no_other(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path)
    run = Run.open(tmp_path)
    with shelf.refused(tmp_path, "has no checkpoint"):
        run.state()
    shelf.save_checkpoint(tmp_path, 8)
    new = shelf.save_checkpoint(tmp_path, 12)
    assert torch.equal(run.state().params["head.w"], new.params["head.w"])
    (tmp_path / "checkpoint" / "round-000012" / "manifest.json").write_text("")
    with shelf.refused(tmp_path, r"checkpoint of round 12 is damaged .*: put it back, or delete summary\.json and"):
        run.state()


def nets(experiment: Experiment, shape: tuple[int, ...]) -> list[Split]:
    """A trained-looking net for each worker: no two equal, statistics moved."""
    made = []
    for worker in range(experiment.workers):
        torch.manual_seed(worker)
        net = build(experiment.recipe.model, shape, 3, head=experiment.head, norm=experiment.norm).to(experiment.dtype)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
            net.train()(torch.randn(8, *shape, dtype=experiment.dtype))
        made.append(net.eval())
    return made


def save_nets(directory: RunDirectory, made: list[Split], shape: tuple[int, ...]) -> None:
    directory.save_models(stack(net.state_dict() for net in made), {**ABOUT, "input_shape": list(shape)})


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_stopped_early_says_how_it_ends_there(lab: SimpleNamespace, tmp_path: Path, every: int) -> None:
    experiment, runtime = lab.tiny(DePRL(), rounds=9), replace(lab.cpu, out=tmp_path, checkpoint_every=3)
    for step in rounds(replace(lab.opened(experiment), runtime=replace(runtime, eval_every=every))):
        if step.round == 3:
            break
    run, end = Run.open(tmp_path, data=experiment.data), {1: 3, 2: 4}[every]
    with pytest.raises(UserError, match=f"or let it end with round {end}, by --rounds {end}, in Python"):
        run.model(0)
    assert [record.round for record in train(replace(experiment, rounds=end), runtime)] == [4] * (every == 2)
    assert run.model(0) is not None and Run.open(tmp_path).finished


def test_old_models_of_a_run_that_goes_on_are_not_taken_for_new(lab: SimpleNamespace, tmp_path: Path) -> None:
    experiment, runtime = lab.tiny(DePRL(), rounds=2), replace(lab.cpu, out=tmp_path, checkpoint_every=1)
    list(train(experiment, runtime))
    for record in train(replace(experiment, rounds=9), runtime):
        if record.round == 4:
            break
    run = Run.open(tmp_path, data=experiment.data)
    with pytest.raises(UserError, match=r"was finished with 2 rounds and has gone on since: continue it to its end"):
        run.model(0)
    list(train(replace(experiment, rounds=9), runtime))
    assert run.model(0) is not None


def test_where_a_schedule_depends_on_the_rounds_none_can_end_early(lab: SimpleNamespace, tmp_path: Path) -> None:
    experiment, runtime = lab.tiny(DisPFL(), rounds=9), replace(lab.cpu, out=tmp_path)
    next(train(experiment, runtime))
    with pytest.raises(UserError, match=r"has no models yet: continue it to its end\.$"):
        Run.open(tmp_path, data=experiment.data).model(0)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_worker_deploys_its_own_net(shelf: SimpleNamespace, tmp_path: Path, precision: Any) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    experiment = replace(shelf.experiment, model=own, precision=precision)
    directory, made = shelf.start(tmp_path, experiment), nets(experiment, (2, 3))
    run = Run.open(tmp_path, model=own)
    with shelf.refused(tmp_path, "has no models yet"):
        run.model(0)
    save_nets(directory, made, (2, 3))
    x = torch.randn(7, 2, 3, dtype=experiment.dtype)
    before = torch.get_rng_state()
    for worker, net in enumerate(made):
        found = run.model(worker)
        assert not found.training
        assert torch.equal(found(x), net(x))
    assert torch.equal(torch.get_rng_state(), before)


class Tied(nn.Module):
    """A layer and a weight that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight, self.again = self.first.weight, self.first
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.second(self.first(x).relu()).relu()))


def test_a_net_that_uses_a_layer_twice_is_read_back(shelf: SimpleNamespace, tmp_path: Path) -> None:
    experiment = replace(shelf.experiment, model=Tied)
    made = nets(experiment, (6,))
    once = {name for name, _ in made[0].named_parameters()}
    leaves = stack({name: leaf for name, leaf in net.state_dict().items() if name in once} for net in made)
    shelf.start(tmp_path, experiment).save_models(leaves, ABOUT)
    x = torch.randn(7, 6)
    assert torch.equal(Run.open(tmp_path, model=Tied).model(2)(x), made[2](x))
    untied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    with shelf.refused(tmp_path, "does not fit the weights"):
        Run.open(tmp_path, model=untied).model(0)


def test_a_net_is_built_by_its_name_without_the_data_it_was_trained_on(shelf: SimpleNamespace, tmp_path: Path) -> None:
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().mean(1)

    experiment = replace(shelf.experiment, loss=loss)
    made = nets(experiment, (6,))
    save_nets(shelf.start(tmp_path, experiment), made, (6,))
    x = torch.randn(7, 6)
    assert torch.equal(Run.open(tmp_path).model(2)(x), made[2](x))
    with shelf.refused(tmp_path, "loss is function"):
        _ = Run.open(tmp_path).experiment
    assert Run.open(tmp_path, loss=loss).experiment == experiment


@dataclass(frozen=True, kw_only=True)
class Lazy(DePRL):
    every: int = 2
    pair: tuple[int, int] = (1, 2)

    name: ClassVar[str] = "lazy"
    title: ClassVar[str] = "Lazy"


def test_a_run_of_an_algorithm_of_ones_own_is_read_with_it(shelf: SimpleNamespace, tmp_path: Path) -> None:
    experiment = replace(shelf.experiment, algorithm=Lazy(every=3))
    made = nets(experiment, (6,))
    save_nets(shelf.start(tmp_path, experiment), made, (6,))
    x = torch.randn(7, 6)
    for given in (Lazy(every=3), Lazy()):
        run = Run.open(tmp_path, algorithm=given)
        assert run.experiment == experiment, "the options are the run's"
        assert torch.equal(run.model(2)(x), made[2](x))
    with shelf.refused(tmp_path, "an experiment with 'lazy', not with 'local': give that algorithm"):
        Run.open(tmp_path, algorithm=Local()).model(2)
    with shelf.refused(tmp_path, r"unknown algorithm 'lazy'.*Run\.open\(path, algorithm=\.\.\.\)"):
        Run.open(tmp_path).model(2)


def test_a_site_gives_its_own_workers_their_models(shelf: SimpleNamespace, tmp_path: Path) -> None:
    own = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    experiment = replace(shelf.experiment, model=own)
    made, about = nets(experiment, (6,)), {**ABOUT, "first_worker": 1, "num_workers": 2}
    shelf.start(tmp_path, experiment).save_models(stack(net.state_dict() for net in made[1:3]), about)
    run, x = Run.open(tmp_path, model=own), torch.randn(7, 6)
    assert run.hosted(run.describe_model()) == range(1, 3)
    for worker in (1, 2):
        assert torch.equal(run.model(worker)(x), made[worker](x))
    for worker in (0, 3):
        with shelf.refused(tmp_path, f"does not have the model of worker {worker}: give the run of that worker's site"):
            run.model(worker)


def test_a_wrong_worker_model_or_file_is_said_in_one_line(shelf: SimpleNamespace, tmp_path: Path) -> None:
    own = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    experiment = replace(shelf.experiment, model=own)
    save_nets(shelf.start(tmp_path, experiment), nets(experiment, (6,)), (6,))
    for worker in (-1, 4, "first"):
        with shelf.refused(tmp_path, f"worker {worker!r} is not in this run: give 0 to 3"):
            Run.open(tmp_path, model=own).model(worker)
    with shelf.refused(
        tmp_path, r"model is module Sequential, .*give it in Python, as Run\.open\(path, model=\.\.\.\)"
    ):
        Run.open(tmp_path).model(0)
    with shelf.refused(tmp_path, "unknown experiment field 'modle'. Did you mean 'model'"):
        Run.open(tmp_path, modle=own).model(0)
    with shelf.refused(tmp_path, "does not fit the weights"):
        Run.open(tmp_path, model=nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))).model(0)
    described = tmp_path / "model.json"
    whole = described.read_text()
    lacking = [{name: value for name, value in ABOUT.items() if name != gone} for gone in ABOUT]
    pixels = {"scale": 16, "mean": [0.0], "std": [1.0]}
    bytes_as = ({"mean": ["0"]}, {"mean": 0}, {"mean": []}, {"mean": [0, 0]}, {"std": [0]}, {"scale": 0}, {"more": 1})
    values = [
        *({"num_classes": it} for it in ("3", 4, True)),
        *({"input_shape": it} for it in (6, [0], ["6"])),
        *({"num_outputs": it} for it in (0, 10**400)),
        *({"pixels": it} for it in (255, {}, *({**pixels, **it} for it in bytes_as))),
        *({name: it} for name in ("first_worker", "num_workers") for it in (-1, 5)),
        {"models_sha256": 7},
    ]
    wrong = [{**ABOUT, **it} for it in values]
    for content in ("", *map(json.dumps, [*lacking, *wrong])):
        described.write_text(content)
        with shelf.refused(tmp_path, r"model\.json is damaged: put it back, or delete summary\.json and continue"):
            Run.open(tmp_path, model=own).model(0)
    described.write_text(whole)
    path = tmp_path / "models.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with shelf.refused(tmp_path, r"models\.safetensors is damaged: put it back, or delete summary\.json and continue"):
        Run.open(tmp_path, model=own).model(0)
    described.write_text(json.dumps({**ABOUT, "models_sha256": sha256(path)}))
    with shelf.refused(tmp_path, r"models\.safetensors cannot be read"):
        Run.open(tmp_path, model=own).model(0)
    described.write_text(json.dumps({**ABOUT, "pixels": pixels}))
    assert Run.open(tmp_path, model=own).describe_model()["pixels"] == pixels


def test_models_of_other_workers_or_of_another_type_are_refused(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """Also where the hash was made to fit."""
    directory, made = shelf.start(tmp_path), nets(shelf.experiment, (6,))
    stacked = {name: torch.stack([net.state_dict()[name] for net in made]) for name in made[0].state_dict()}
    first = next(iter(stacked))
    for change, said in (
        (lambda leaf: leaf[:1], r"models\.safetensors holds the models of other workers than model\.json says: put it"),
        (lambda leaf: leaf[0, 0, 0], "holds the models of other workers"),
        (lambda leaf: leaf.double(), "the model does not fit the weights"),
        (lambda leaf: leaf.flatten(1), "the model does not fit the weights"),
    ):
        directory.save_models({**stacked, first: change(stacked[first])}, {**ABOUT})
        with shelf.refused(tmp_path, said):
            Run.open(tmp_path).model(0)


def test_models_are_used_only_as_they_were_written(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """One flipped bit still makes a file of weights, only that they are others."""
    save_nets(shelf.start(tmp_path), nets(shelf.experiment, (6,)), (6,))
    path, run = tmp_path / "models.safetensors", Run.open(tmp_path)
    run.model(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with shelf.refused(tmp_path, r"models\.safetensors is damaged: put it back, or delete summary\.json and continue"):
        Run.open(tmp_path).model(1)
    save_nets(shelf.start(tmp_path), nets(shelf.experiment, (6,))[::-1], (6,))
    path.write_bytes(whole)
    with shelf.refused(tmp_path, r"models\.safetensors is damaged"):
        run.model(0)


def test_models_are_looked_through_once(
    shelf: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of a thousand workers."""
    save_nets(shelf.start(tmp_path), nets(shelf.experiment, (6,)), (6,))
    run = Run.open(tmp_path)
    run.model(0)
    monkeypatch.setattr("manyheads.store.reader.sha256", lambda _: pytest.fail("they were read again"))
    assert run.model(1) is not None


@pytest.mark.parametrize("name", ["models.safetensors", "model.json"])
def test_a_finished_run_without_its_models_says_what_brings_them_back(
    lab: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    experiment, runtime = lab.tiny(DePRL(), rounds=2), replace(lab.cpu, out=tmp_path)
    list(train(experiment, runtime))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing: put it back, or delete summary\.json and continue"):
        Run.open(tmp_path, data=experiment.data).model(0)
    (tmp_path / "summary.json").unlink()
    list(train(experiment, runtime))
    assert (tmp_path / name).read_bytes() == whole
