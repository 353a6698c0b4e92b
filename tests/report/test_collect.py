import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from manyheads.errors import UserError
from manyheads.report import open_comparison
from manyheads.report.collect import find_runs


def test_one_run_and_nested_runs_are_found_in_the_order_of_their_paths(tmp_path: Path, write_run):
    write_run(tmp_path / "b" / "deep" / "run", seed=2)
    write_run(tmp_path / "a", seed=1)
    found = find_runs(tmp_path)
    assert [run.seed for run in found.runs] == [1, 2]
    assert [run.seed for run in find_runs(tmp_path / "a").runs] == [1]


def test_what_lies_inside_a_run_is_not_a_run_of_its_own(tmp_path: Path, write_run):
    write_run(tmp_path / "run")
    write_run(tmp_path / "run" / "joined", seed=2)
    assert len(find_runs(tmp_path).runs) == 1


def test_runs_whose_rates_were_not_chosen_are_no_part_of_a_comparison(tmp_path: Path, write_run):
    write_run(tmp_path / "run", lr=0.1)
    write_run(tmp_path / "tuning" / "run", lr=0.2)
    assert [run.options["lr"] for run in find_runs(tmp_path).runs] == [0.1]
    assert [run.options["lr"] for run in find_runs(tmp_path / "tuning").runs] == [0.2]


def test_unfinished_runs_are_counted_and_left_out(tmp_path: Path, write_run):
    write_run(tmp_path / "done")
    write_run(tmp_path / "stopped", seed=2, finished=False)
    extended = write_run(tmp_path / "extended", seed=3)
    description = json.loads((extended / "experiment.json").read_text())
    (extended / "experiment.json").write_text(json.dumps({**description, "rounds": 99}))
    broken = write_run(tmp_path / "broken", seed=4)
    (broken / "summary.json").write_text('{"rounds": ')
    found = find_runs(tmp_path)
    assert [run.seed for run in found.runs] == [1]
    assert found.unfinished == 3


def test_a_run_copied_is_counted_once(tmp_path: Path, write_run):
    shutil.copytree(write_run(tmp_path / "run"), tmp_path / "copy")
    found = find_runs(tmp_path)
    assert (len(found.runs), found.repeated) == (1, 1)


def test_an_own_file_is_the_same_wherever_machines_keep_it(tmp_path: Path, write_run):
    places = {"here/my.npz": "aa", "there/my.npz": "aa", "else/my.npz": "bb"}
    for seed, (data, content) in enumerate(places.items()):
        path = write_run(tmp_path / f"run-{seed}", data=data, seed=seed)
        about = {"federation": json.dumps({"content": content})}
        save_file({"ids": np.arange(8)}, path / "partition.safetensors", metadata=about)
    shutil.copytree(tmp_path / "run-1", tmp_path / "run-3")
    found = find_runs(tmp_path)
    assert [run.options["data"] for run in found.runs] == ["here/my.npz", "here/my.npz", "else/my.npz"]
    assert found.repeated == 1


def test_a_file_that_was_overwritten_is_other_data(tmp_path: Path, write_run):
    for seed, content in enumerate(("aa" * 9, "bb" * 9, "aa" * 9)):
        path = write_run(tmp_path / f"run-{seed}", data="my.npz", seed=seed)
        about = {"federation": json.dumps({"content": content})}
        save_file({"ids": np.arange(8)}, path / "partition.safetensors", metadata=about)
    names = [run.options["data"] for run in find_runs(tmp_path).runs]
    assert names == ["my.npz", "my.npz bbbbbbbb", "my.npz"]
    assert len(open_comparison(tmp_path).settings) == 2


def test_objects_of_one_kind_are_told_apart(tmp_path: Path, write_run):
    for seed, content in enumerate(("aa" * 9, "bb" * 9)):
        path = write_run(tmp_path / f"run-{seed}", seed=seed) / "experiment.json"
        arrays = {"kind": "arrays", "name": "arrays", "sha256": content}
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": arrays}))
    assert {str(setting) for setting in open_comparison(tmp_path).settings} == {"data arrays", "data arrays bbbbbbbb"}


def test_a_description_of_another_number_of_workers_is_refused(tmp_path: Path, write_run):
    path = write_run(tmp_path / "run") / "experiment.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, "workers": description["workers"] - 1}))
    with pytest.raises(UserError, match=r"run holds values of other workers than its experiment\.json says: put that"):
        find_runs(tmp_path)


@pytest.mark.parametrize("content", [7, []])
def test_a_hash_that_is_none_names_nothing(tmp_path: Path, write_run, content: object):
    path = write_run(tmp_path / "run") / "experiment.json"
    arrays = {"kind": "arrays", "sha256": content}
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": arrays}))
    (found,) = find_runs(tmp_path).runs
    assert found.options["data"] == arrays


def test_only_some_of_the_runs_under_a_folder(tmp_path: Path, write_run):
    shutil.copytree(write_run(tmp_path / "run"), tmp_path / "copy")
    (found,) = find_runs(tmp_path, {tmp_path / "run"}).runs
    assert found.path == tmp_path / "run", "although the copy comes first"


def test_the_sites_of_a_run_are_one_run(tmp_path: Path, write_run):
    for worker in (0, 2, 5):
        site = write_run(tmp_path / "run" / f"site-{worker}", data="site-{worker}.npz", split="natural")
        net = {"input_shape": [5], "num_outputs": 3, "num_classes": 3, "pixels": None, "models_sha256": ""}
        about = {**net, "first_worker": worker}
        (site / "model.json").write_text(json.dumps(about))
    found = find_runs(tmp_path)
    assert ([run.path.name for run in found.runs], found.repeated) == (["site-0"], 0)
    shutil.copytree(tmp_path / "run" / "site-2", tmp_path / "copy")
    found = find_runs(tmp_path)
    assert (len(found.runs), found.repeated) == (1, 1)


def test_sites_that_ended_their_run_apart_are_not_one_run(tmp_path: Path, write_run):
    """Each was left alone by the others: their last values of the workers contradict each other."""
    for worker, away, level in ((0, [2, 5], 0.7), (2, [0], 0.9), (5, [0], 0.9)):
        site = write_run(tmp_path / "run" / f"site-{worker}", data="site-{worker}.npz", split="natural", level=level)
        net = {"input_shape": [5], "num_outputs": 3, "num_classes": 3, "pixels": None, "models_sha256": ""}
        about = {**net, "first_worker": worker}
        (site / "model.json").write_text(json.dumps(about))
        summary = json.loads((site / "summary.json").read_text())
        (site / "summary.json").write_text(json.dumps({**summary, "workers_without_test": len(away)}))
    found = find_runs(tmp_path)
    assert [run.path.name for run in found.runs] == ["site-2"], "most workers were there"
    assert [path.name for path in found.parted] == ["site-0"]
    said = "run/site-0 is left out: it ended without the sites whose result is shown. Report on it separately."
    assert open_comparison(tmp_path).remarks == [said]
    assert [run.path.name for run in find_runs(tmp_path / "run" / "site-0").runs] == ["site-0"]
    (tmp_path / "run" / "site-0" / "workers.jsonl").unlink()
    assert find_runs(tmp_path).parted == [], "nothing is known that contradicts the others"


def test_a_site_that_did_not_finish_is_no_run_of_its_own(tmp_path: Path, write_run):
    for seed, finished in ((1, True), (2, False)):
        for worker in (0, 1, 2):
            folder = tmp_path / f"run-{seed}" / f"site-{worker}"
            done = finished and worker == 1
            write_run(folder, data="site-{worker}.npz", split="natural", seed=seed, finished=done)
    found = find_runs(tmp_path)
    assert ([run.seed for run in found.runs], found.unfinished) == ([1], 1)


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, write_run):
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], '{"round": 2, "accu\n', "null\n", *lines[3:]]))
    (run,) = find_runs(tmp_path).runs
    assert [row["round"] for row in run.metrics] == [1, *range(4, 11)]
    assert run.damaged == 2


def test_the_values_of_workers_are_those_of_the_last_round_or_none(tmp_path: Path, write_run):
    path = write_run(tmp_path / "run")
    (run,) = find_runs(tmp_path).runs
    assert run.workers["round"] == 10
    assert len(run.workers["accuracy"]) == 8
    lines = (path / "workers.jsonl").read_text().splitlines(keepends=True)
    (path / "workers.jsonl").write_text("".join(lines[:-1]))
    (run,) = find_runs(tmp_path).runs
    assert run.workers == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is empty"),
        ({"notes.txt": "hello"}, "holds no run"),
        ({"experiment.json": "{}"}, "not a manyheads experiment"),
        ({"experiment.json": "[1, 2"}, "not a manyheads experiment"),
        ({"experiment.json": '{"algorithm": {"name": "deprl"}, "workers": "many"}'}, "not a manyheads experiment"),
    ],
)
def test_folders_that_hold_no_runs_are_refused_in_one_line(tmp_path: Path, content, message: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in (content or {}).items():
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        find_runs(folder)
    assert "\n" not in str(error.value)


def test_a_comparison_that_is_still_being_tuned_is_refused_as_such(tmp_path: Path, write_run):
    write_run(tmp_path / "tuning" / "deprl-1")
    with pytest.raises(UserError, match="only holds runs that --tune has tried so far: start the command"):
        find_runs(tmp_path)


def test_a_folder_that_is_none_and_one_without_a_finished_run_are_refused(tmp_path: Path, write_run):
    with pytest.raises(UserError, match="is not a folder"):
        find_runs(tmp_path / "missing")
    write_run(tmp_path / "run", finished=False)
    with pytest.raises(UserError, match=r"the run under .* is unfinished"):
        find_runs(tmp_path)
    write_run(tmp_path / "another", seed=2, finished=False)
    with pytest.raises(UserError, match=r"each of the 2 runs under .* is unfinished"):
        find_runs(tmp_path)


def test_similarities_are_read_when_they_are_there_and_fit(tmp_path: Path, write_run):
    from safetensors.numpy import save_file
    from safetensors.torch import save_file as torch_save

    low = torch.eye(8, dtype=torch.bfloat16)
    path = write_run(tmp_path / "run", similarity=True)
    (run,) = find_runs(tmp_path).runs
    assert {name: values.shape for name, values in run.similarity.items()} == {
        "data": (8, 8), "heads": (8, 8), "representations": (8, 8)
    }  # fmt: skip
    save_file({"data": np.eye(8), "heads": np.eye(3)}, path / "similarity.safetensors")
    (run,) = find_runs(tmp_path).runs
    assert list(run.similarity) == ["data"]
    save_file({"data": np.eye(8, dtype=int), "heads": np.eye(8, dtype=np.complex64)}, path / "similarity.safetensors")
    (run,) = find_runs(tmp_path).runs
    assert run.similarity == {}
    # The second: a type that numpy does not have.
    for harm in (lambda file: file.write_bytes(b"nonsense"), lambda file: torch_save({"data": low}, file)):
        harm(path / "similarity.safetensors")
        (run,) = find_runs(tmp_path).runs
        with pytest.raises(UserError, match="cannot be read"):
            _ = run.similarity
