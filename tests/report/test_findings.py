import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from manyheads.algorithms import DPSGD, REGISTRY, attribute_of
from manyheads.cli.tables import result_table
from manyheads.report import write
from manyheads.report.comparison import open_comparison
from manyheads.report.findings import caveats, conditions, outcome, title, verdict
from manyheads.report.table import rows


def _set(path: Path, **values: float | None) -> None:
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, **values}))


def test_a_few_systems_are_named_in_the_title_and_many_below_it(tmp_path: Path, write_run):
    for algorithm in ("deprl", "local"):
        write_run(tmp_path / algorithm, algorithm)
    comparison = open_comparison(tmp_path)
    assert title(comparison) == "DePRL and Local on digits"
    assert conditions(comparison) == "8 workers, graph ring, split dirichlet:0.1, 10 rounds, seed 1."
    write_run(tmp_path / "fedavg", "fedavg")
    assert title(open_comparison(tmp_path)) == "DePRL, FedAvg and Local on digits"
    write_run(tmp_path / "ditto", "ditto")
    comparison = open_comparison(tmp_path)
    assert title(comparison) == "DePRL and 3 others on digits"
    assert conditions(comparison).startswith("DePRL, FedAvg, Ditto and Local: 8 workers")


def test_of_one_a_report_speaks_as_of_one(tmp_path: Path, write_run):
    write_run(tmp_path / "run", "join", {"learned_by": "deprl"}, workers=1, rounds=1, similarity=True)
    comparison = open_comparison(tmp_path)
    assert conditions(comparison) == "1 worker, no graph, split dirichlet:0.1, 1 round, seed 1."
    found = re.findall(r"\b1 (?:workers|rounds|seeds|runs|samples)\b.{9}", write(comparison).read_text())
    assert found == ["1 runs them one"], "said of --threads 1"


def test_systems_with_commas_of_their_own_are_told_apart(tmp_path: Path, write_run):
    for epochs in (2, 10):
        write_run(tmp_path / f"{epochs}", "deprl", {"head_epochs": epochs})
    write_run(tmp_path / "local", "local")
    assert title(open_comparison(tmp_path)) == "DePRL, head epochs 2; DePRL, head epochs 10; Local on digits"


def test_who_names_classes_in_an_order_of_its_own_is_said(tmp_path: Path, write_run):
    write_run(tmp_path / "run", relabel=True)
    assert "every worker naming the classes in its own order" in conditions(open_comparison(tmp_path))


def test_scores_of_other_models_than_those_after_mixing_are_told(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl")
    write_run(tmp_path / "b", "d-psgd", {"order": "mix-train", "evaluate": "mean-model"})
    write_run(tmp_path / "c", "dispfl", {"order": "mix-train"})
    assert caveats(open_comparison(tmp_path)) == [
        "Scored as local training leaves them, not after mixing (order mix-train): D-PSGD and DisPFL.",
        "Scored with the mean of all models, not with each worker's own (evaluate mean-model): D-PSGD.",
    ]


def test_local_work_is_told_where_it_is_not_the_same(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl")
    write_run(tmp_path / "b", "local")
    assert caveats(open_comparison(tmp_path)) == []
    write_run(tmp_path / "c", "ditto", {"epochs": 9})
    write_run(tmp_path / "d", "d-psgd", {"steps": 1})
    write_run(tmp_path / "e", "fedrep", {"head_steps": 4, "participation": 0.1})
    assert caveats(open_comparison(tmp_path)) == [
        "Local work in a round: 3 passes (DePRL and Local); 1 mini-batch (D-PSGD);"
        " 1 pass and 4 mini-batches, by 10 % of the workers (FedRep); 9 passes for each of 2 models (Ditto)."
    ]


def test_what_an_algorithm_says_of_itself_may_follow_from_its_options(tmp_path: Path, write_run, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Ensemble(DPSGD):
        members: int = 2

        title: ClassVar[str] = "Ensemble"

        @property
        def num_models(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.members

    monkeypatch.setitem(REGISTRY, DPSGD.name, Ensemble)
    for members in (2, 4):
        write_run(tmp_path / f"{members}", DPSGD.name, {"members": members})
    write_run(tmp_path / "local", "local")
    assert caveats(open_comparison(tmp_path)) == [
        "Local work in a round: 3 passes for each of 2 models (Ensemble, members 2);"
        " 3 passes for each of 4 models (Ensemble, members 4); 3 passes (Local)."
    ]
    # A run of a time when there was another option.
    assert attribute_of(DPSGD.name, {"members": 5, "gone": 1}, "num_models") == 5
    assert attribute_of(DPSGD.name, {"gone": 1}, "row_stochastic") is False
    assert attribute_of("unheard-of", {}, "num_models") is None


def test_the_outcome_says_lead_error_and_floor(tmp_path: Path, write_run):
    scores = {"deprl": (0.91, 0.93), "d-psgd": (0.88, 0.8998)}
    for algorithm, values in scores.items():
        for seed, value in enumerate(values):
            run = write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed)
            _set(run, accuracy_mean=value, majority_floor=0.5)
    assert conditions(open_comparison(tmp_path)).endswith("10 rounds, 2 seeds (0, 1).")
    assert outcome(open_comparison(tmp_path), 0) == (
        "DePRL reaches 92.0 ± 1.4 %, 3.0 points (standard error 0.0) ahead of D-PSGD."
        " Naming each worker's most frequent class would score 50.0 %."
    )


@pytest.mark.parametrize(
    ("leads", "told_apart"),
    [
        ((0.02, 0.03), False),  # t = 5.0, and 12.7 would be beyond chance
        ((0.02, 0.03, 0.025), True),  # t = 8.7 of 4.3
        ((0.1, 0.01, 0.1, 0.01), False),  # t = 2.1 of 3.2
        ((0.03, 0.01) * 8, True),  # t = 7.7
    ],
)
def test_a_lead_that_so_few_seeds_may_show_by_chance_is_called_noise(
    tmp_path: Path, write_run, leads: tuple[float, ...], told_apart: bool
):
    for seed, lead in enumerate(leads):
        _set(write_run(tmp_path / f"a{seed}", "deprl", rounds=1, seed=seed), accuracy_mean=0.8 + lead)
        _set(write_run(tmp_path / f"b{seed}", "local", rounds=1, seed=seed), accuracy_mean=0.8)
    noise = "" if told_apart else f", which {len(leads)} seeds cannot tell from noise"
    assert f" ahead of Local{noise}." in outcome(open_comparison(tmp_path), 0)


def test_new_workers_are_several_and_have_no_graph(tmp_path: Path, write_run):
    _set(write_run(tmp_path / "a" / "b", "join"), accuracy_mean=0.9)
    assert outcome(open_comparison(tmp_path / "a"), 0).startswith("New workers reach 90.0 %.")
    assert conditions(open_comparison(tmp_path / "a")).startswith("8 workers, no graph, split ")
    write_run(tmp_path / "c" / "d", "fedavg")
    assert conditions(open_comparison(tmp_path / "c")).startswith("8 workers, a server, split ")


def test_of_one_seed_no_error_is_known(tmp_path: Path, write_run):
    _set(write_run(tmp_path / "one" / "a", "deprl"), accuracy_mean=0.9)
    _set(write_run(tmp_path / "one" / "b", "local"), accuracy_mean=0.8)
    assert "10.0 points ahead of Local (one seed: no error is known)." in outcome(open_comparison(tmp_path / "one"), 0)


def test_a_lead_over_fewer_seeds_than_were_run_says_so(tmp_path: Path, write_run):
    for seed, level in ((1, 0.9), (2, 0.5)):
        _set(write_run(tmp_path / f"deprl{seed}", "deprl", seed=seed), accuracy_mean=level)
    _set(write_run(tmp_path / "local", "local", seed=2), accuracy_mean=0.4)
    said = outcome(open_comparison(tmp_path), 0)
    assert "10.0 points ahead of Local (one seed that both have: no error is known)." in said
    lines = result_table(open_comparison(tmp_path)).splitlines()
    assert "* best; ± deviation over 1 to 2 seeds (behind the best: standard error)" in lines


def test_the_best_is_best_over_the_seeds_that_both_have(tmp_path: Path, write_run):
    """Its own mean may be higher for an easier seed alone."""
    for algorithm, scores in {"deprl": {1: 0.9, 2: 0.5}, "local": {2: 0.6, 3: 0.55}}.items():
        for seed, level in scores.items():
            _set(write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed), accuracy_mean=level)
    comparison = open_comparison(tmp_path)
    assert outcome(comparison, 0).startswith("Local reaches 57.5 ± 3.5 %")
    assert "10.0 points ahead of DePRL (one seed that both have: no error is known)." in outcome(comparison, 0)
    seeds = {row.label: row.cells[-1].text for row in rows(comparison)}
    assert (seeds["DePRL"], seeds["Local"]) == ("1, 2", "2, 3"), "over which each mean is"


def test_a_third_system_takes_no_seeds_from_the_lead_between_two(tmp_path: Path, write_run):
    for seed, luck in ((1, -0.05), (2, 0.0), (3, 0.01), (4, 0.01)):
        for algorithm, score in {"deprl": 0.9 + luck, "local": 0.85 + luck / 2, "fedavg": 0.7}.items():
            if algorithm != "fedavg" or seed == 1:
                _set(write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed), accuracy_mean=score)
    comparison = open_comparison(tmp_path)
    assert "4.6 points (standard error 0.7) ahead of Local." in outcome(comparison, 0)
    behind = {row.label: row.cells[1].text for row in rows(comparison) if not row.floor}
    assert behind == {"DePRL": "–", "Local": "4.6 ± 0.7", "FedAvg": "15.0"}


def test_pairs_that_contradict_one_another_have_no_best(tmp_path: Path, write_run):
    """DePRL is ahead of Local, Local of FedAvg, and FedAvg of DePRL, each over the seeds that both have."""
    for algorithm, scores in {"deprl": {1: 0.5, 2: 0.9}, "local": {1: 0.6, 2: 0.7}, "fedavg": {1: 0.55}}.items():
        for seed, level in scores.items():
            _set(write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed), accuracy_mean=level)
    comparison = open_comparison(tmp_path)
    assert outcome(comparison, 0) == "The systems share too few seeds: none is named the best."
    assert not any(row.cells[0].best for row in rows(comparison))


def test_all_that_are_level_are_named(tmp_path: Path, write_run):
    for algorithm in ("deprl", "d-psgd", "local", "fedavg"):
        score = 0.4 if algorithm == "fedavg" else 0.5
        _set(write_run(tmp_path / algorithm, algorithm), accuracy_mean=score)
    assert ", level with D-PSGD and Local." in outcome(open_comparison(tmp_path), 0)


@pytest.mark.parametrize(("deprl", "local"), [((0.1, 0.3, 0.4), (0.4, 0.1, 0.3)), ((0.7, 0.55, 0.4), (0.4, 0.7, 0.55))])
def test_what_differs_by_how_it_was_summed_is_equal(
    deprl: tuple[float, ...], local: tuple[float, ...], tmp_path: Path, write_run
):
    for algorithm, scores in {"deprl": deprl, "local": local}.items():
        for seed, level in enumerate(scores):
            _set(write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed), accuracy_mean=level)
    comparison = open_comparison(tmp_path)
    assert ", level with Local." in outcome(comparison, 0)
    assert [row.cells[0].best for row in rows(comparison) if not row.floor] == [True, True]
    assert not any(cell.text.startswith("-0") for row in rows(comparison) for cell in row.cells)


def test_a_floor_is_that_of_the_same_seeds(tmp_path: Path, write_run):
    """Of a seed that only another system has, the floor may be lower."""
    for algorithm, seed, floor in (("deprl", 1, 0.6), ("local", 1, 0.6), ("local", 2, 0.1)):
        _set(write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed), accuracy_mean=0.5, majority_floor=floor)
    assert "no system scores more" in outcome(open_comparison(tmp_path), 0)


def test_settings_in_which_several_are_level_are_counted_by_themselves(tmp_path: Path, write_run):
    for workers, local in ((8, 0.5), (4, 0.4)):
        for algorithm, level in (("deprl", 0.5), ("local", local)):
            _set(write_run(tmp_path / f"{algorithm}{workers}", algorithm, workers=workers), accuracy_mean=level)
    assert "DePRL in 1 and several level in 1 of 2 settings" in verdict(open_comparison(tmp_path))


def test_what_is_equal_is_level(tmp_path: Path, write_run):
    for algorithm in ("deprl", "local"):
        _set(write_run(tmp_path / algorithm, algorithm), accuracy_mean=0.5)
    comparison = open_comparison(tmp_path)
    assert outcome(comparison, 0).startswith("DePRL reaches 50.0 %, level with Local.")
    assert [row.cells[0].best for row in rows(comparison) if not row.floor] == [True, True]


def test_without_a_common_seed_none_is_the_best(tmp_path: Path, write_run):
    for seed, algorithm in enumerate(("deprl", "local")):
        write_run(tmp_path / algorithm, algorithm, seed=seed)
    assert outcome(open_comparison(tmp_path), 0) == "The systems share too few seeds: none is named the best."


def test_a_mean_over_fewer_workers_says_so(tmp_path: Path, write_run):
    first = write_run(tmp_path / "a", "deprl")
    _set(first, accuracy_mean=0.9, workers_without_test=1)
    assert outcome(open_comparison(tmp_path), 0).startswith("DePRL reaches 90.0 % over 7 of 8 workers. ")
    other = write_run(tmp_path / "b", "local")
    _set(other, accuracy_mean=0.8, workers_without_test=1)
    said = "DePRL reaches 90.0 % over 7 of 8 workers, 10.0 points ahead of Local"
    assert f"{said} (one seed" in outcome(open_comparison(tmp_path), 0), "where both leave them out it is said once"
    _set(other, workers_without_test=0)
    assert f"{said} over 8 of 8 workers (one seed" in outcome(open_comparison(tmp_path), 0)
    _set(first, workers_without_test=0)
    _set(other, workers_without_test=1)
    said = "DePRL reaches 90.0 %, 10.0 points ahead of Local over 7 of 8 workers"
    assert said in outcome(open_comparison(tmp_path), 0)


def test_seeds_may_leave_out_different_numbers_of_workers(tmp_path: Path, write_run):
    for seed in range(3):
        _set(write_run(tmp_path / f"{seed}", seed=seed), accuracy_mean=0.9, workers_without_test=seed)
    assert " % over 6 to 8 of 8 workers." in outcome(open_comparison(tmp_path), 0)


def test_a_grid_is_summed_up(tmp_path: Path, write_run):
    for split, levels in {"iid": (0.9, 0.7), "shards:2": (0.7, 0.9), "shards:3": (0.9, 0.7)}.items():
        for algorithm, level in zip(("deprl", "local"), levels, strict=True):
            write_run(tmp_path / f"{algorithm}-{split}", algorithm, split=split, level=level)
    comparison = open_comparison(tmp_path)
    assert (
        conditions(comparison)
        == "8 workers, graph ring, 10 rounds, seed 1. Each with split iid, shards:2 and shards:3."
    )
    assert verdict(comparison) == (
        "Ahead in accuracy: DePRL in 2 and Local in 1 of 3 settings (one seed: no error is known)."
    )


def test_a_winner_below_the_majority_floor_is_none(tmp_path: Path, write_run):
    for split, score in {"iid": 0.4, "shards:2": 0.6, "shards:3": 0.5}.items():
        for algorithm, behind in (("deprl", 0.0), ("local", 0.1)):
            run = write_run(tmp_path / split / algorithm, algorithm, split=split)
            _set(run, accuracy_mean=score - behind, majority_floor=0.5)
    assert verdict(open_comparison(tmp_path / "iid")) == (
        "DePRL reaches 40.0 %, 10.0 points ahead of Local (one seed: no error is known). Naming each worker's most"
        " frequent class would score 50.0 %, and no system scores more: train longer, or with other rates."
    )
    assert verdict(open_comparison(tmp_path)).endswith(
        " In 2 no system does better than naming each worker's most frequent class: train longer, or with other rates."
    )


def test_a_grid_says_which_leads_are_more_than_noise(tmp_path: Path, write_run):
    for split, lead in {"iid": 0.2, "shards:2": -0.2, "shards:3": 0.005}.items():
        for seed, luck in ((1, -0.01), (2, 0.0), (3, 0.01)):
            for algorithm, score in (("deprl", 0.7 + lead + luck), ("local", 0.7)):
                run = write_run(tmp_path / f"{algorithm}-{split}-{seed}", algorithm, split=split, seed=seed)
                _set(run, accuracy_mean=score)
    said = "Ahead in accuracy: DePRL in 2 and Local in 1 of 3 settings, in 2 by more than noise."
    assert verdict(open_comparison(tmp_path)) == said


def test_a_regression_is_not_in_percent(tmp_path: Path, write_run):
    _set(write_run(tmp_path / "a"), accuracy_mean=-0.25, majority_floor=None)
    assert title(open_comparison(tmp_path)) == "DePRL on digits"
    assert verdict(open_comparison(tmp_path)) == "DePRL reaches -0.250."


def test_nobody_is_ahead_alone_or_without_scores(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        write_run(tmp_path / "alone" / split, split=split)
        for algorithm in ("deprl", "local"):
            run = write_run(tmp_path / "unscored" / algorithm / split, algorithm, split=split)
            _set(run, accuracy_mean=None)
            assert verdict(open_comparison(run)) == ""
    assert verdict(open_comparison(tmp_path / "alone")) == verdict(open_comparison(tmp_path / "unscored")) == ""
