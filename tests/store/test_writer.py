"""A run directory is one experiment's and one process's; what is killed at any moment can be taken up again."""

import errno
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from manyheads.algorithms import DPSGD, DePRL
from manyheads.errors import UserError
from manyheads.files import locked
from manyheads.store import Run
from manyheads.store.layout import finished_rounds


def test_a_new_directory_holds_the_whole_experiment(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path / "runs" / "a")
    assert directory.path == tmp_path / "runs" / "a"
    assert (directory.path / "experiment.json").read_text() == shelf.experiment.to_json()
    assert Run.open(directory.path).experiment == shelf.experiment
    assert finished_rounds(directory.path) == 0


def test_the_same_experiment_is_taken_up_again(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path).append(shelf.record(1))
    before = shelf.contents(tmp_path)
    shelf.start(tmp_path)
    shelf.start(tmp_path, resume=True)
    assert shelf.contents(tmp_path) == before


def test_resume_insists_on_the_directory_and_on_nothing_else(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """A job that is always started with it begins in the empty folder that its scheduler has made."""
    with shelf.refused(tmp_path, rf"--resume: there is no {tmp_path / 'a'}\."):
        shelf.start(tmp_path / "a", resume=True)
    assert list(tmp_path.iterdir()) == []
    shelf.start(tmp_path, resume=True)
    assert (tmp_path / "experiment.json").exists()


def test_another_experiment_is_refused_by_the_options_that_differ(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path)
    with shelf.refused(tmp_path, r"\(graph ring there, full here; seed 1 there, 2 here\): choose another --out"):
        shelf.start(tmp_path, replace(shelf.experiment, graph="full", seed=2))
    links = f"links:{','.join(f'0-{i}' for i in range(1, 999))}"
    with shelf.refused(tmp_path, r"\(graph ring there, links:0-1,0-2,0-3,0-4,\.\.\. \(998, \w{4}\) here\): choose an"):
        shelf.start(tmp_path, replace(shelf.experiment, graph=links))
    with shelf.refused(tmp_path, r"\(head_epochs 2 there, 5 here\)"):
        shelf.start(tmp_path, replace(shelf.experiment, algorithm=DePRL(head_epochs=5)))
    with shelf.refused(tmp_path, r"\(algorithm deprl there, d-psgd here; graph ring there, full here\)"):
        shelf.start(tmp_path, replace(shelf.experiment, algorithm=DPSGD(), graph="full"))
    with shelf.refused(tmp_path, r"\(model mlp:64 there, module Linear \w{8} here\)"):
        shelf.start(tmp_path, replace(shelf.experiment, model=nn.Linear(64, 10)))


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"algorithm": 3}'])
def test_a_damaged_experiment_is_refused(shelf: SimpleNamespace, tmp_path: Path, content: str) -> None:
    shelf.start(tmp_path)
    (tmp_path / "experiment.json").write_text(content)
    with shelf.refused(tmp_path, r"experiment\.json is damaged"):
        shelf.start(tmp_path)


ALGORITHM = """
from dataclasses import dataclass
from manyheads.algorithms import DPSGD

def scale(x, rng):
    return x * {factor}

@dataclass(frozen=True, kw_only=True)
class Gossip(DPSGD):
    {docstring}
    name = "gossip"
    title = "{title}"

    def mix(self, state, round, ctx):
        return {mixed}  # {comment}
"""


def _own_code(path: Path, name: str, **words: str) -> ModuleType:
    """A module of the user's, as it is written at the moment."""
    usual = {"title": "Gossip", "factor": "2", "docstring": "", "mixed": "state", "comment": ""}
    path.write_text(ALGORITHM.format(**{**usual, **words}))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ({}, None),
        ({"comment": "as it is", "docstring": '"""Nobody mixes."""', "title": "Silence"}, None),
        ({"mixed": "super().mix(state, round, ctx)"}, "algorithm"),
        ({"factor": "3"}, "transform"),
    ],
)
def test_code_of_the_users_that_has_changed_is_refused(
    shelf: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, str], whose: str | None
) -> None:
    """Or one curve would be of two algorithms."""
    monkeypatch.setitem(sys.modules, "own_code", ModuleType("own_code"))
    for place, changes in enumerate(({}, words)):
        module = _own_code(tmp_path / "own_code.py", "own_code", **changes)
        experiment = replace(shelf.experiment, algorithm=module.Gossip(), transform=module.scale, rounds=50 + place)
        if place and whose:
            with pytest.raises(
                UserError,
                match=f"run was begun with different code in its {whose}: put the old code back, choose another --out,"
                " or remove the folders that were begun with the old code, in a comparison's tuning too: only those",
            ):
                shelf.start(tmp_path / "run", experiment)
        else:
            shelf.start(tmp_path / "run", experiment)
            shelf.save_checkpoint(tmp_path / "run", 3, experiment)
    kept = json.loads((tmp_path / "run" / "code.json").read_text())
    assert kept.keys() == {"python", "algorithm", "transform"}, "the net is the package's"


def test_code_may_change_until_there_is_something_to_go_on_from(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """As when its first mistake has shown in the first round."""
    first, mended = (replace(shelf.experiment, transform=code) for code in (lambda x, rng: x + 1, lambda x, rng: x))
    file = shelf.start(tmp_path, first).path / "code.json"
    kept = file.read_bytes()
    shelf.start(tmp_path, mended)
    assert file.read_bytes() != kept
    shelf.save_checkpoint(tmp_path, 1, mended)
    with shelf.refused(tmp_path, "was begun with different code in its transform"):
        shelf.start(tmp_path, first)


def test_constants_may_change_until_then_too(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    one, other = {"representation.fc.weight": torch.ones(2)}, {"representation.fc.weight": torch.zeros(2)}
    for constants in (one, {}, other):
        directory.keep_constants(constants, begun=False)
        assert (tmp_path / "constants.safetensors").exists() == bool(constants)
    directory.keep_constants(other, begun=True)
    for more in ({}, {**other, "representation.fc.bias": torch.zeros(2)}):
        with pytest.raises(UserError, match="begun with different weights"):
            directory.keep_constants(more, begun=True)
    with pytest.raises(UserError, match="begun with different weights under requires_grad=False"):
        directory.keep_constants(one, begun=True)


def test_constants_that_are_no_numbers_are_themselves(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory, mask = shelf.start(tmp_path), {"representation.mask": torch.tensor([torch.nan, -torch.inf])}
    directory.keep_constants(mask, begun=False)
    directory.keep_constants(mask, begun=True)


def test_code_is_kept_from_the_beginning_on(shelf: SimpleNamespace, tmp_path: Path) -> None:
    experiment = replace(shelf.experiment, transform=lambda x, rng: x)
    file = shelf.start(tmp_path, experiment).path / "code.json"
    kept = file.read_bytes()
    file.unlink()
    shelf.start(tmp_path, experiment)
    assert file.read_bytes() == kept, "a process killed before it was written has trained nothing"
    file.write_text(elsewhere := json.dumps({"python": "3.0", "transform": "compiled into something else"}))
    shelf.start(tmp_path, experiment)
    assert file.read_text() == elsewhere, "who comes back to that Python is held to it"


def test_a_directory_that_is_no_run_is_left_alone(shelf: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with shelf.refused(tmp_path, "is not empty and not a run directory"):
        shelf.start(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with shelf.refused(tmp_path, "is a file"):
        shelf.start(tmp_path / "thesis.tex")
    with shelf.refused(tmp_path, "cannot write .*: Not a directory"):
        shelf.start(tmp_path / "thesis.tex" / "run")


def test_a_process_killed_before_its_experiment_was_written_is_in_nobodys_way(
    shelf: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".experiment.json.12ab34cd.part").write_text("{")
    shelf.start(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "experiment.json"]


def test_more_rounds_extend_a_run(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    directory.finish(shelf.record(50), {})
    assert Run.open(tmp_path).finished
    longer = replace(shelf.experiment, rounds=80)
    directory = shelf.start(tmp_path, longer)
    assert Run.open(tmp_path).finished, "until nothing can be refused any more"
    directory.write_experiment(longer)
    assert Run.open(tmp_path).experiment == longer and not Run.open(tmp_path).finished


def test_fewer_rounds_than_done_are_finished(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    shelf.save_checkpoint(tmp_path, 50)
    directory.finish(shelf.record(50), {})
    shelf.start(tmp_path, replace(shelf.experiment, rounds=20))
    assert finished_rounds(tmp_path) == 50
    assert Run.open(tmp_path).experiment.rounds == 50


def test_a_run_cannot_be_taken_back_behind_its_checkpoint(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path)
    shelf.save_checkpoint(tmp_path, 12)
    with shelf.refused(tmp_path, "has reached round 12, beyond --rounds 11: give at least 12"):
        shelf.start(tmp_path, replace(shelf.experiment, rounds=11))
    shelf.start(tmp_path, replace(shelf.experiment, rounds=20))


def test_rounds_are_fixed_where_the_schedule_depends_on_them(shelf: SimpleNamespace, tmp_path: Path) -> None:
    scheduled = replace(shelf.experiment, schedule="corollary")
    shelf.start(tmp_path, scheduled)
    with shelf.refused(tmp_path, r"\(rounds 50 there, 80 here, on which its numbers depend\)"):
        shelf.start(tmp_path, replace(scheduled, rounds=80))


def test_records_are_lines_in_two_files(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    for round in (1, 2):
        directory.append(shelf.record(round, loss=float("nan")))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {**shelf.record(2).metrics(), "loss": None}
    run = Run.open(tmp_path)
    assert run.metrics() == [json.loads(line) for line in lines]
    assert run.workers()[1] == {"round": 2, "accuracy": [0.5, None, 0.25, 0.2]}
    assert run.damaged_lines == 0


def test_a_record_can_be_taken_up_again(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    assert directory.record(1) is None
    for round in (1, 2):
        directory.append(shelf.record(round))
    assert directory.record(2) == shelf.record(2)
    assert directory.record(3) is None


def test_records_are_cut_back_to_a_round(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    directory.cut_back(0)
    for round in range(1, 6):
        directory.append(shelf.record(round))
    directory.cut_back(5)
    directory.cut_back(3)
    run = Run.open(tmp_path)
    assert shelf.rounds(run.metrics()) == shelf.rounds(run.workers()) == [1, 2, 3]
    directory.append(shelf.record(4))
    assert shelf.rounds(run.metrics()) == [1, 2, 3, 4]
    directory.cut_back(0)
    assert run.metrics() == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_line_that_was_not_written_to_its_end_is_dropped(shelf: SimpleNamespace, tmp_path: Path, cut: int) -> None:
    directory = shelf.start(tmp_path)
    for round in (1, 2):
        directory.append(shelf.record(round))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    run = Run.open(tmp_path)
    assert shelf.rounds(run.metrics()) == [1]
    assert run.damaged_lines == 1
    directory.cut_back(2)
    directory.append(shelf.record(2))
    assert shelf.rounds(run.metrics()) == [1, 2]
    assert run.damaged_lines == 0


def test_the_summary_is_the_last_record(shelf: SimpleNamespace, tmp_path: Path) -> None:
    directory = shelf.start(tmp_path)
    assert Run.open(tmp_path).summary() is None
    directory.finish(shelf.record(50, loss=float("inf")), {"notes": ["one"], "runtime": {"engine": "loop"}})
    expected = {
        **shelf.record(50).metrics(),
        "rounds": 50,
        "loss": None,
        "notes": ["one"],
        "runtime": {"engine": "loop"},
    }
    del expected["round"]
    assert Run.open(tmp_path).summary() == expected
    assert finished_rounds(tmp_path) == 50
    (tmp_path / "summary.json").write_text('{"rounds": 5')
    assert finished_rounds(tmp_path) == 0


def test_a_full_disk_is_said_in_one_line(
    shelf: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = shelf.start(tmp_path)
    directory.finish(shelf.record(50), {})

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with shelf.refused(tmp_path, r"cannot write .*summary\.json: No space left on device"):
        directory.finish(shelf.record(60), {})
    with shelf.refused(tmp_path, r"cannot write .*models\.safetensors|cannot write .*model\.json"):
        directory.save_models({"head.w": torch.zeros(4, 2)}, {})
    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        directory.append(shelf.record(51))


def test_parts_are_joined_to_the_very_file_of_one_process(
    shelf: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy of any leaf: nobody need have the memory for all workers' models."""
    whole, parted = shelf.start(tmp_path / "whole"), shelf.start(tmp_path / "parted")
    leaves = {f"representation.{k}": torch.randn(12, 3, k) for k in range(4)}
    leaves["representation.count"] = torch.arange(12)
    whole.save_models(leaves, {"num_outputs": 3})
    for workers in (range(2), range(2, 10), range(10, 12)):
        rows = slice(workers.start, workers.stop)
        parted.save_some_models({name: leaf[rows] for name, leaf in leaves.items()}, workers)
    monkeypatch.delattr(torch, "cat")
    parted.join_models({"num_outputs": 3}, num_workers=12, patience=0)
    same = shelf.contents(parted.path) == shelf.contents(whole.path)
    assert same, "the bytes themselves would be minutes of difference to show"


def test_models_are_joined_only_where_every_worker_has_one(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """On a network's disk a part may be late: without it, others would get the models of its workers."""
    directory = shelf.start(tmp_path)

    def save(workers: range) -> None:
        directory.save_some_models({"head.w": torch.tensor(workers)}, workers)

    def join(patience: float) -> None:
        directory.join_models({"num_outputs": 3}, num_workers=100_002, patience=patience)

    save(range(4))
    save(range(100_000, 100_002))
    with shelf.refused(tmp_path, r"the models of 6 of 100002 workers: choose an --out on a disk that all processes"):
        join(0)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(join, 30)
        save(range(4, 100_000))
        joining.result(30)
    assert torch.equal(dict(directory.models(["head.w"]))["head.w"], torch.arange(100_002))


def test_a_directory_that_is_being_written_is_not_taken_up(shelf: SimpleNamespace, tmp_path: Path) -> None:
    shelf.start(tmp_path)
    with locked(tmp_path), shelf.refused(tmp_path, "another run is writing to"):
        shelf.start(tmp_path, replace(shelf.experiment, rounds=80))


def test_an_option_that_only_one_side_knows_is_a_difference(shelf: SimpleNamespace, tmp_path: Path) -> None:
    """As when the directory was begun by another version."""
    path = shelf.start(tmp_path).path / "experiment.json"
    told = json.loads(path.read_text())
    frozen = told["algorithm"].pop("frozen")
    path.write_text(json.dumps(told))
    with shelf.refused(tmp_path, rf"\(frozen not given there, {frozen} here\)"):
        shelf.start(tmp_path)
    told["algorithm"] |= {"frozen": frozen, "thawed": "late"}
    path.write_text(json.dumps(told))
    with shelf.refused(tmp_path, r"\(thawed late there, not given here\)"):
        shelf.start(tmp_path)
