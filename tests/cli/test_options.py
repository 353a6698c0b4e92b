"""Options: every field of every dataclass becomes one, and what is given comes back as the Experiment it describes."""

import argparse
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from manyheads.algorithms import DPSGD, REGISTRY, Local
from manyheads.cli import options
from manyheads.cli.options import Option, add_options, experiments, given, options_of
from manyheads.cli.parser import Parser
from manyheads.data import NAMES
from manyheads.derived import resolve
from manyheads.errors import UserError
from manyheads.experiment import FUNCTIONS, Experiment, Runtime
from manyheads.models.nets import NETS


def _parse(*words: str, several: bool = False) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_options(parser, several=several)
    return parser.parse(words)


def _one(*words: str) -> Experiment:
    (experiment,) = experiments(_parse(*words))
    return experiment


def _other(option: Option) -> tuple[list[str], Any]:
    """Words that give an option a value that is not its default, and that value."""
    if option.kind is bool:
        return [option.flag], True
    if option.choices:
        word = next(word for word in option.choices if word != option.default)
        return [option.flag, word], word
    text = "own:function" if option.name in FUNCTIONS else "iid"
    value = {int: 7, float: 0.25, str: text, Path: Path("some/where")}[option.kind]
    return [option.flag, str(value)], value


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_of_every_algorithm_round_trips(name: str) -> None:
    kind = REGISTRY[name]
    assert options_of(kind).keys() == {spec.name for spec in fields(kind)}
    for option in options_of(kind).values():
        words, value = _other(option)
        algorithm = _one(name, *words).algorithm
        assert isinstance(algorithm, kind)
        assert getattr(algorithm, option.name) == value
    assert _one(name) == Experiment(algorithm=kind())


@pytest.mark.parametrize("option", options_of(Experiment).values(), ids=lambda option: option.flag)
def test_every_field_of_an_experiment_round_trips(option: Option) -> None:
    words, value = _other(option)
    assert _one("deprl", *words) == Experiment(**{option.name: value})


def test_every_field_of_a_runtime_round_trips() -> None:
    assert options_of(Runtime).keys() == {spec.name for spec in fields(Runtime)}
    for option in options_of(Runtime).values():
        words, value = _other(option)
        assert Runtime(**given(_parse("deprl", *words), Runtime)) == Runtime(**{option.name: value})


def test_what_no_word_can_stand_for_is_no_option() -> None:
    left_out = {spec.name for spec in fields(Experiment)} - options_of(Experiment).keys()
    assert left_out == {"algorithm"}


def test_every_option_is_explained() -> None:
    owners = [Experiment, Runtime, *REGISTRY.values()]
    assert not [o.flag for owner in owners for o in options_of(owner).values() if not o.help.endswith(".")]


def test_the_help_names_every_data_set_and_net_and_fits_every_algorithm() -> None:
    known = options_of(Experiment)
    assert not [name for name in NAMES if f" {name}," not in known["data"].help]
    assert not [name for name in NETS if f" {name}" not in known["model"].help]
    orders = {owner["order"].help for kind in REGISTRY.values() if "order" in (owner := options_of(kind))}
    assert len(orders) == 1, "the command line shows one text for all"


def test_auto_leaves_a_value_open() -> None:
    assert given(_parse("deprl", "--checkpoint-every", "auto"), Runtime) == {"checkpoint_every": None}
    assert _one("deprl", "--lr", "auto", "--weights", "auto") == Experiment()


def test_the_algorithm_may_stand_anywhere() -> None:
    assert _one("--workers", "4", "d-psgd", "--rounds", "3").algorithm.name == "d-psgd"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deprl", "--grph", "ring"], "unknown option --grph. Did you mean --graph?"),
        (["deprl", "--round=3"], "unknown option --round. Did you mean --rounds?"),
        (["deprl", "--xyzzy"], "unknown option --xyzzy. See test --help."),
        (["deprl", "extra"], "unexpected word 'extra': see test --help."),
        (["deprl", "--workers", "many"], "--workers: 'many' is not a whole number."),
        (["deprl", "--workers", "4.5"], "--workers: '4.5' is not a whole number."),
        (
            ["deprl", "--workers", str(10**20)],
            f"--workers: '{10**20}' is too large: give a number that fits into 64 bits.",
        ),
        (["deprl", "--lr", "fast"], "--lr: 'fast' is not a number."),
        (["deprl", "--workers"], "--workers: expected one argument"),
        (
            ["deprl", "--norm", "grup"],
            "--norm: unknown value 'grup'. Did you mean 'group'? Allowed: group, local, shared.",
        ),
        (["deprl", "--workers", "-3"], "--workers -3 is not positive: give a number above 0."),
        (["deprl", "--lr", "nan"], "--lr nan is not finite, or too large: give another number."),
        (["deprl", "--evaluate", "own"], "--evaluate is an option of d-psgd, not of deprl: leave it out."),
        (["local", "--head-epochs", "2"], "--head-epochs is an option of deprl, fedrep, not of local: leave it out."),
        (["deprl", "--head-steps", "-1"], "--head-steps -1 is negative: give a number of at least 0."),
        (["depr"], "unknown algorithm 'depr'. Did you mean 'deprl'? Allowed:"),
        ([], "no algorithm given: name one of deprl,"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        experiments(_parse(*words))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dfedper", "join"])
def test_an_algorithm_of_ones_own_is_found_through_its_file(name: str) -> None:
    """Wherever it is asked for: by its name, or by a run of it."""
    own = "For one of your own give this command through the file that registers it, as python FILE.py ..., or in Pyth"
    for ask in (
        lambda: experiments(_parse(name)),
        lambda: experiments(_parse("deprl", name, several=True)),
        lambda: Experiment.from_json('{"algorithm": {"name": "dfedper"}}'),
    ):
        with pytest.raises(UserError, match=r"^unknown algorithm '\w+'\. ") as caught:
            ask()
        assert str(caught.value).count(own) == 1


class Plain(Local):
    name = title = "plain"


@pytest.mark.parametrize(
    ("kind", "default", "says"),
    [
        (bool, False, "--quiet of plain clashes with an option of the command line itself: rename it."),
        (float, 1.0, "--epochs of plain is float, and int with d-psgd: give both the same type, or rename one."),
        (int, MISSING, "Plain() fails: TypeError: Plain.__init__() missing 1 required keyword-only argument: 'rank'"),
    ],
)
def test_options_of_an_own_algorithm_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, kind: type, default: Any, says: str
) -> None:
    name = {bool: "quiet", float: "epochs", int: "rank"}[kind]
    made = make_dataclass("Plain", [(name, kind, field(default=default))], bases=(Plain,), frozen=True, kw_only=True)
    monkeypatch.setitem(REGISTRY, "plain", made)
    monkeypatch.setattr(options, "_field_docs", lambda owner: {})
    parser = Parser()
    parser.add_argument("--quiet")
    with pytest.raises(UserError) as caught:
        add_options(parser)
    assert str(caught.value) == says


def test_from_a_file_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    before = Experiment(algorithm=REGISTRY["deprl"](head_epochs=5), workers=4, relabel=True, rounds=3, lr=0.5)
    path.write_text(before.to_json())
    assert _one("--from", str(path)) == before
    assert _one("--from", str(tmp_path)) == before
    changed = _one("--from", str(path), "--body-epochs", "2", "--no-relabel", "--rounds", "9", "--lr", "auto")
    assert changed.algorithm == REGISTRY["deprl"](head_epochs=5, body_epochs=2)
    assert (changed.relabel, changed.rounds, changed.lr, changed.workers) == (False, 9, None, 4)
    other = _one("local", "--from", str(path))
    assert (other.algorithm, other.workers) == (REGISTRY["local"](), 4)


def test_grid() -> None:
    words = ["deprl", "d-psgd", "local", "--graph", "ring", "full", "--epochs", "1", "2", "--relabel", "yes", "no"]
    found = experiments(_parse(*words, several=True))
    # deprl has no --epochs: 2 graphs x 2 switches; the others twice as many.
    assert [e.algorithm.name for e in found] == ["deprl"] * 4 + ["d-psgd"] * 8 + ["local"] * 8
    assert len({(e.algorithm, e.graph, e.relabel) for e in found}) == len(found)
    assert experiments(_parse("deprl", several=True)) == [Experiment()]
    with pytest.raises(UserError, match="--head-epochs is an option of"):
        experiments(_parse("d-psgd", "local", "--head-epochs", "1", several=True))
    with pytest.raises(UserError, match="--relabel: unknown value 'maybe'"):
        _parse("deprl", "--relabel", "maybe", several=True)


def test_what_followed_from_another_net_or_algorithm_does_not_stay(tmp_path: Path) -> None:
    """As if the whole command had been given at once."""
    path = tmp_path / "experiment.json"

    def written(*words: str) -> str:
        path.write_text(resolve(_one(*words), (1, 8, 8)).to_json())
        return str(path)

    def complete(*words: str) -> Experiment:
        return resolve(_one(*words), (1, 8, 8))

    assert complete("--from", written("deprl"), "--model", "cnn") == complete("deprl", "--model", "cnn")
    assert complete("--from", written("deprl"), "--batch-size", "64") == complete("deprl", "--batch-size", "64")
    graph = ["--graph", "random:0.5"]
    assert complete("deprl", "--from", written("dispfl", *graph)) == complete("deprl", *graph)
    assert complete("dispfl", "--from", written("deprl", *graph)) == complete("dispfl", *graph)
    assert complete("deprl", "--from", written("fedavg")) == complete("deprl"), "which has no graph to take over"
    given = ["--step-seconds", "3", "--weights", "uniform"]
    assert complete("--from", written("d-psgd", *given), "--model", "cnn") == complete(
        "d-psgd", *given, "--model", "cnn"
    )


def test_a_graph_of_ones_own_takes_no_weights_over_from_another_run(tmp_path: Path) -> None:
    path, own = tmp_path / "experiment.json", "links:0-1=0.3,1-2=0.3"
    path.write_text(Experiment(weights="lazy").to_json())
    found = [_one("deprl", "--from", str(path), *graph) for graph in ([], ["--graph", "full"], ["--graph", own])]
    assert [each.weights for each in found] == ["lazy", "lazy", None]


@pytest.mark.parametrize("several", [False, True])
def test_passes_and_steps_exclude_each_other_even_where_the_passes_are_the_default(several: bool) -> None:
    words = ["deprl", "--head-epochs", "2", "--head-steps", "3"]
    with pytest.raises(UserError, match="--head-epochs and --head-steps exclude each other: give one"):
        experiments(_parse(*words, several=several))


def test_an_algorithm_typed_into_an_interpreter_has_options_without_help():
    """Nobody keeps the text of its class."""
    made = {"mu": 0.5, "__annotations__": {"mu": float}, "name": "typed", "title": "Typed"}
    typed = dataclass(frozen=True, kw_only=True)(type("Typed", (DPSGD,), made))
    found = options_of(typed)
    assert (found["mu"].help, found["mu"].default) == ("", 0.5)
    assert found["epochs"].help == options_of(DPSGD)["epochs"].help != ""


def test_a_run_s_function_that_has_no_name_is_replaced_by_one_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment.json").write_text(Experiment(loss=lambda output, y: output[:, 0], rounds=7).to_json())
    with pytest.raises(UserError, match=r"or, with --from, name it, as --loss package\.module:function\.$"):
        _one("--from", str(tmp_path))
    assert _one("--from", str(tmp_path), "--loss", "losses:own") == Experiment(loss="losses:own", rounds=7)
