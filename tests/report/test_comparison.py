import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from manyheads.algorithms import DPSGD, REGISTRY
from manyheads.errors import UserError
from manyheads.report.comparison import open_comparison
from manyheads.report.naming import shown, slugs
from manyheads.report.options import options_by_data
from manyheads.rounds import run


def test_seeds_of_a_system_are_one_cell(tmp_path: Path, write_run):
    for seed, algorithm in itertools.product((12, 1), ("local", "deprl")):
        write_run(tmp_path / f"{algorithm}-{seed}", algorithm, seed=seed)
    comparison = open_comparison(tmp_path)
    assert [system.label for system in comparison.systems] == ["DePRL", "Local"]
    assert comparison.grid == ()
    assert [[run.seed for run in comparison.cells[i, 0]] for i in (0, 1)] == [[1, 12], [1, 12]]
    assert comparison.seeds == (1, 12)
    assert comparison.shared["graph"] == "ring"


def test_options_of_an_algorithm_make_systems_of_their_own(tmp_path: Path, write_run):
    for epochs in (10, 2):
        write_run(tmp_path / str(epochs), "deprl", {"head_epochs": epochs})
    write_run(tmp_path / "other", "d-psgd")
    labels = [system.label for system in open_comparison(tmp_path).systems]
    assert labels == ["DePRL, head epochs 2", "DePRL, head epochs 10", "D-PSGD"]
    # A tuple, as an algorithm of one's own may have it, is a list in a file.
    for epochs in (10, 2):
        path = tmp_path / str(epochs) / "experiment.json"
        path.write_text(path.read_text().replace(f'"head_epochs": {epochs}', f'"head_epochs": [1, {epochs}]'))
    labels = [system.label for system in open_comparison(tmp_path).systems]
    assert labels == ["DePRL, head epochs [1, 10]", "DePRL, head epochs [1, 2]", "D-PSGD"]


def test_new_workers_are_told_apart_by_who_taught_them_and_averaged_over_seeds(tmp_path: Path, write_run):
    for seed, teacher in itertools.product((1, 12), ("deprl", "d-psgd")):
        own = {"learned_by": teacher, "teacher": f"a {teacher}", "learned": f"{seed}{teacher}"}
        write_run(tmp_path / f"{teacher}-{seed}", "join", own, seed=seed)
    comparison = open_comparison(tmp_path)
    assert [s.label for s in comparison.systems] == ["New workers, learned by d-psgd", "New workers, learned by deprl"]
    assert [[run.seed for run in comparison.cells[i, 0]] for i in (0, 1)] == [[1, 12], [1, 12]]
    write_run(tmp_path / "on-another-graph", "join", {"learned_by": "deprl", "teacher": "another"})
    labels = [system.label for system in open_comparison(tmp_path).systems]
    # Older runs do not have the options of the run that they joined.
    assert labels[1:] == [f"New workers, learned by deprl, teacher {one}" for one in ("a deprl", "another")]
    for name, graph in (("deprl-1", "ring"), ("deprl-12", "ring"), ("on-another-graph", "torus")):
        path = tmp_path / name / "summary.json"
        taught = {"algorithm": "deprl", "graph": graph, "workers": 8, "seed": len(name)}
        path.write_text(json.dumps({**json.loads(path.read_text()), "teacher": taught}))
    labels = [system.label for system in open_comparison(tmp_path).systems]
    learned = ("d-psgd", "deprl, learned with graph ring", "deprl, learned with graph torus")
    assert labels == [f"New workers, learned by {what}" for what in learned]


def test_a_graph_that_is_not_random_has_its_place_beside_one_that_is_redrawn(tmp_path: Path, write_run):
    for graph, redraw in (("ring", False), ("random:0.5", True)):
        write_run(tmp_path / graph, "deprl", graph=graph, redraw=redraw)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.shared["redraw"]) == (("graph",), True)
    assert sorted(comparison.cells) == [(0, 0), (0, 1)]
    write_run(tmp_path / "drawn once", "deprl", graph="random:0.5", redraw=False)
    assert [str(setting) for setting in open_comparison(tmp_path).settings] == [
        "graph random:0.5, redraw no", "graph random:0.5, redraw yes", "graph ring, redraw no"
    ]  # fmt: skip


def test_systems_are_compared_on_one_code_but_for_their_own(tmp_path: Path, write_run):
    for name, model in (("deprl", "old"), ("local", "new")):
        code = {"python": "3.11", "algorithm": name, "model": model}
        (write_run(tmp_path / name, name) / "code.json").write_text(json.dumps(code))
    with pytest.raises(UserError, match=r"^deprl and local under .* were run with different code in their model: move"):
        open_comparison(tmp_path)
    (tmp_path / "local" / "code.json").write_text(json.dumps({**code, "model": "old"}))
    assert len(open_comparison(tmp_path).systems) == 2


def test_code_that_changed_is_not_taken_for_an_effect_of_the_graph(tmp_path: Path, write_run):
    for graph, model in (("ring", "old"), ("full", "new")):
        for algorithm in ("deprl", "d-psgd"):
            path = write_run(tmp_path / f"{algorithm}-{graph}", algorithm, graph=graph)
            (path / "code.json").write_text(json.dumps({"python": "3.11", "model": model}))
    with pytest.raises(UserError, match="were run with different code in their model: move one away"):
        open_comparison(tmp_path)
    # Of another version of Python nobody can tell.
    for algorithm in ("deprl", "d-psgd"):
        code = {"python": "3.12", "model": "new"}
        (tmp_path / f"{algorithm}-full" / "code.json").write_text(json.dumps(code))
    assert len(open_comparison(tmp_path).settings) == 2


def test_a_seed_counts_once_and_for_one_code(tmp_path: Path, write_run):
    for place, code in (("a", "old"), ("b", "new")):
        path = write_run(tmp_path / place, "deprl", seed=1 if place == "a" else 2)
        (path / "code.json").write_text(json.dumps({"python": "3.11", "algorithm": code}))
    with pytest.raises(UserError, match=r"^a and b under .* were run with different code in their algorithm: move"):
        open_comparison(tmp_path)
    (tmp_path / "b" / "code.json").unlink()
    assert open_comparison(tmp_path).seeds == (1, 2)
    for learned in ("c", "d"):
        write_run(tmp_path / "joined" / learned, "join", {"learned_by": "deprl", "teacher": "a", "learned": learned})
    with pytest.raises(UserError, match=r"^c and d under .* are both New workers with seed 1: move one away"):
        open_comparison(tmp_path / "joined")


def test_settings_are_in_order_words_by_the_alphabet_and_numbers_by_size(tmp_path: Path, write_run):
    splits = ["dirichlet:0.5", "dirichlet:2", "dirichlet:10", "iid", "shards:2"]
    for place, split in enumerate(reversed(splits)):
        write_run(tmp_path / str(place), split=split)
    assert [setting.values["split"] for setting in open_comparison(tmp_path).settings] == splits


def test_a_system_need_not_have_a_run_in_every_setting(tmp_path: Path, write_run):
    for split, epochs in (("iid", 2), ("shards:2", 10)):
        write_run(tmp_path / f"{epochs}", "deprl", {"head_epochs": epochs}, split=split)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.cells.keys()) == (("split",), {(0, 0), (1, 1)})


def test_options_that_every_algorithm_was_run_with_are_a_grid(tmp_path: Path, write_run):
    for number, (algorithm, split, graph) in enumerate(
        itertools.product(("deprl", "d-psgd", "dispfl"), ("dirichlet:0.3", "dirichlet:0.1"), ("ring", "full"))
    ):
        write_run(tmp_path / str(number), algorithm, split=split, graph=graph)
    comparison = open_comparison(tmp_path)
    assert comparison.grid == ("split", "graph"), "in the order of the command line's help"
    assert {setting.values["split"] for setting in comparison.settings[:1]} == {"dirichlet:0.1"}
    assert len(comparison.settings) == 4
    assert len(comparison.cells) == 12


def test_an_algorithm_without_neighbours_belongs_to_every_graph(tmp_path: Path, write_run):
    for graph in ("ring", "full"):
        write_run(tmp_path / graph, "deprl", graph=graph, link_failure=0.1)
    write_run(tmp_path / "server", "fedavg")
    write_run(tmp_path / "alone", "local")
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.shared["link_failure"]) == (("graph",), 0.1)
    assert comparison.cells[1, 0] == comparison.cells[1, 1]
    assert len(comparison.cells) == 6
    assert len(comparison.runs) == 4


def test_an_algorithm_that_looks_at_no_weights_belongs_to_any(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl", weights="lazy")
    write_run(tmp_path / "b", "dispfl")
    assert open_comparison(tmp_path).grid == ()
    write_run(tmp_path / "c", "deprl")
    comparison = open_comparison(tmp_path)
    assert comparison.grid == ("weights",)
    assert comparison.cells[1, 0] == comparison.cells[1, 1]


@dataclass(frozen=True, kw_only=True)
class Own(DPSGD):
    name = "own"
    title = "My own"


def test_an_algorithm_that_is_not_registered_has_its_title(tmp_path: Path, lab, monkeypatch):
    session = lab.opened(lab.tiny(Own()))
    list(run(replace(session, runtime=replace(lab.cpu, out=tmp_path / "run"))))
    assert [system.label for system in open_comparison(tmp_path).systems] == ["My own"]
    # Where it is registered, it has its title of today.
    monkeypatch.setitem(REGISTRY, Own.name, Own)
    monkeypatch.setattr(Own, "title", "My very own")
    assert [system.label for system in open_comparison(tmp_path).systems] == ["My very own"]


def test_algorithms_of_ones_own_stand_beside_the_others(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl")
    for name in ("mine", "hers", "yours", "ours"):
        description = write_run(tmp_path / name, "d-psgd") / "experiment.json"
        description.write_text(description.read_text().replace('"name": "d-psgd"', f'"name": "{name}"'))
    comparison = open_comparison(tmp_path)
    assert [system.label for system in comparison.systems] == ["DePRL", "hers", "mine", "ours", "yours"]
    assert comparison.grid == ()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"split": "iid"}, "--split (deprl has no finished run with --split iid)"),
        ({"workers": 9}, "--workers (deprl has no finished run with --workers 9)"),
        ({"rounds": 5}, "--rounds (deprl has no finished run with --rounds 5)"),
        ({"graph": "full"}, "--graph (deprl has no finished run with --graph full)"),
        ({"test_split": "overlap"}, "--test-split (deprl has no finished run with --test-split overlap)"),
        ({"weights": "lazy"}, "--weights (deprl has no finished run with --weights lazy)"),
    ],
)
def test_runs_that_disagree_are_refused_and_the_option_is_named(tmp_path: Path, write_run, other, named: str):
    write_run(tmp_path / "a", "deprl")
    write_run(tmp_path / "b", "d-psgd", **other)
    with pytest.raises(UserError) as error:
        open_comparison(tmp_path)
    assert f"disagree on {named}: " in str(error.value)
    assert "\n" not in str(error.value)


def test_only_what_can_be_run_is_called_missing(tmp_path: Path, write_run):
    """Not every combination can: data without users have no natural split."""
    write_run(tmp_path / "a", data="digits", split="shards:2", workers=9)
    write_run(tmp_path / "b", data="mine.npz", split="natural", workers=12)
    told = "--data, --workers, --split (deprl was run with some of their combinations only): run what is missing"
    with pytest.raises(UserError, match=re.escape(told)):
        open_comparison(tmp_path)
    write_run(tmp_path / "c", "d-psgd", data="mine.npz", split="natural", workers=12)
    told = "(deprl has no finished run with --data mine.npz, --workers 12, --split natural): run what is missing"
    with pytest.raises(UserError, match=re.escape(told)):
        open_comparison(tmp_path, {tmp_path / "a", tmp_path / "c"})


def test_links_with_weights_of_their_own_stand_beside_other_graphs(tmp_path: Path, write_run):
    for algorithm in ("deprl", "d-psgd", "local"):
        write_run(tmp_path / algorithm, algorithm, graph="ring", workers=3)
        if algorithm != "local":
            write_run(tmp_path / f"{algorithm}-own", algorithm, graph="links:0-1=0.3,1-2=0.3", weights=None, workers=3)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.shared["weights"]) == (("graph",), "metropolis")
    assert len(comparison.cells) == 6


@pytest.mark.parametrize(
    "grid",
    [
        {"batch_size": (8, 16)},
        {"batch_size": (8, 16), "lr": (0.1, 0.2)},
        {"model": ("mlp:64", "cnn")},
        {"model": ("mlp:64", "cnn"), "lr": (0.1, 0.2)},
        {"model": ("mlp:64", "cnn"), "batch_size": (8, 16), "momentum": (0.0, 0.9)},
    ],
)
def test_a_steps_time_that_follows_from_net_and_batch_is_no_part_of_a_grid(tmp_path: Path, write_run, grid):
    for values in itertools.product(*grid.values()):
        for algorithm in ("deprl", "local"):
            options = dict(zip(grid, values, strict=True))
            write_run(tmp_path / f"{algorithm}{values}", algorithm, **options)
    comparison = open_comparison(tmp_path)
    assert set(comparison.grid) == set(grid)
    assert (comparison.apart, comparison.by_data) == ((), ())
    assert len(comparison.cells) == 2 * len(comparison.settings)


def test_values_that_never_meet_are_no_grid(tmp_path: Path, write_run):
    write_run(tmp_path / "a", workers=8, split="iid")
    write_run(tmp_path / "b", workers=9, split="dirichlet:0.1")
    with pytest.raises(UserError, match=r"disagree on --workers, --split \(deprl was run with some"):
        open_comparison(tmp_path)


def test_rates_may_be_chosen_for_each_algorithm(tmp_path: Path, write_run):
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", "deprl", seed=seed, lr=0.1)
        write_run(tmp_path / f"b{seed}", "d-psgd", seed=seed, lr=0.2)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.apart) == ((), ("lr",))
    assert "lr" not in comparison.shared


def test_rates_that_all_algorithms_were_run_with_are_a_grid(tmp_path: Path, write_run):
    for algorithm, lr in itertools.product(("deprl", "d-psgd"), (0.1, 0.02)):
        write_run(tmp_path / f"{algorithm}{lr}", algorithm, lr=lr)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.apart) == (("lr",), ())
    assert [setting.values["lr"] for setting in comparison.settings] == [0.02, 0.1]


def test_rates_may_not_change_with_the_seed(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl", lr=0.1)
    for seed, lr in ((1, 0.1), (2, 0.2), (3, 0.1), (4, 0.1), (5, 0.1)):
        write_run(tmp_path / f"b{seed}", "d-psgd", seed=seed, lr=lr)
    with pytest.raises(UserError, match=r"disagree on --lr \(D-PSGD ran with 0.1 in b1, b3, b4, 1 more; 0.2 in b2\)"):
        open_comparison(tmp_path)


def test_what_follows_from_the_data_is_no_axis(tmp_path: Path, write_run):
    recipes = {
        "digits": {"model": "mlp:64", "lr": 0.2, "rounds": 5},
        "mine.npz": {"model": "cnn", "lr": 0.1, "rounds": 4},
    }
    for algorithm, data, workers in itertools.product(("deprl", "local"), recipes, (8, 9)):
        write_run(tmp_path / f"{algorithm}{data}{workers}", algorithm, data=data, workers=workers, **recipes[data])
    comparison = open_comparison(tmp_path)
    assert comparison.grid == ("data", "workers")
    assert sorted(comparison.by_data) == ["lr", "model", "rounds", "step_seconds"]
    assert comparison.apart == ()
    assert len(comparison.cells) == 8
    assert options_by_data(comparison)["model"] == {"digits": "mlp:64", "mine.npz": "cnn"}


def test_rates_may_be_chosen_for_each_algorithm_on_each_data_set(tmp_path: Path, write_run):
    for number, (algorithm, data) in enumerate(itertools.product(("deprl", "local"), ("digits", "mine.npz"))):
        model = "mlp:64" if data == "digits" else "cnn"
        write_run(tmp_path / str(number), algorithm, data=data, model=model, lr=0.1 + 0.1 * number)
    comparison = open_comparison(tmp_path)
    assert (comparison.grid, comparison.by_data, comparison.apart) == (("data",), ("model", "step_seconds"), ("lr",))


def test_what_is_left_out_is_said(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a")
    assert open_comparison(tmp_path).remarks == []
    for seed in (2, 3):
        write_run(tmp_path / str(seed), seed=seed, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    assert open_comparison(tmp_path).remarks == [
        "2 unfinished runs are left out.",
        "1 damaged line of a run's metrics is skipped.",
    ]


def test_records_that_a_copy_lacks_are_said(tmp_path: Path, write_run):
    for seed in (1, 2, 3):
        path = write_run(tmp_path / f"run-{seed}", seed=seed)
        for log in ("metrics.jsonl", "workers.jsonl"):
            lines = (path / log).read_text().splitlines(keepends=True)
            (path / log).write_text("".join(lines[: 10 if seed == 3 else 4]))
    (tmp_path / "run-2" / "metrics.jsonl").unlink()
    assert open_comparison(tmp_path).remarks == [
        "metrics.jsonl ends early in run-1 (round 4 of 10), run-2 (round 0 of 10): the curves are incomplete.",
        "workers.jsonl lacks the last round in run-1, run-2: these workers are not shown.",
    ]


def test_an_experiment_on_objects_can_be_reported(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a")
    description = json.loads((run / "experiment.json").read_text())
    description["data"] = {"kind": "arrays", "name": "mine", "sha256": "0" * 64}
    (run / "experiment.json").write_text(json.dumps(description))
    assert shown(open_comparison(tmp_path).shared["data"]) == "arrays mine"
    assert shown({"kind": "function mine"}) == "function mine"
    assert shown({"kind": "arrays", "name": "arrays"}) == "arrays"


def test_slugs_are_names_of_files_and_all_different():
    assert slugs(["DePRL, head epochs 2", "a/b", "a b", "../..", "é"]) == [
        "deprl-head-epochs-2",
        "a-b",
        "a-b-3",
        "x",
        "x-5",
    ]
    assert slugs(["a", "a 3", "a"]) == ["a", "a-3", "a-4"]
    paths = [f"data {'/folder' * 40}/{name}.npz" for name in "xy"]
    assert len(set(slugs(paths))) == 2 and max(map(len, slugs(paths))) < 100, "a file's name has at most 255 letters"
