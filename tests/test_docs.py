"""README, guide and pages say what is true: names, options, fields, commands, links and examples."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import manyheads
from manyheads import cli
from manyheads.algorithms import REGISTRY, Algorithm
from manyheads.cli.options import experiments, options_of
from manyheads.grid import SEEDS
from manyheads.models.nets import NETS
from manyheads.record import Record

ROOT = Path(__file__).parent.parent
README, GUIDE, TUTORIAL = ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/tutorial.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = [
    module
    for found in pkgutil.iter_modules(cli.__path__)
    if "run" in vars(module := importlib.import_module(f"manyheads.cli.{found.name}"))
]
FOREIGN_FLAGS = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--standalone", "--max-restarts", "--local-addr", "--nodes", "--ntasks-per-node"),
}
"""Options of torchrun and Slurm that the pages show."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's shell blocks."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def run_blocks(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the page's Python blocks one after another in a folder; gives what they define."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    return names


def options_table(algorithm: type[Algorithm]) -> str:
    """An algorithm's own options as its page shows them."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in options_of(algorithm).values():
        choices = " {" + ",".join(option.choices) + "}" if option.choices else ""
        default = "" if option.default is None else f"`{option.default}`"
        rows.append(f"| `{option.flag}{choices}` | {default} | {option.help} |")
    return "\n".join(rows)


def anchors(page: Path) -> set[str]:
    """What a link into the page may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", manyheads.__all__)
def test_public_name_is_explained(name):
    value = getattr(manyheads, name)
    # A dataclass without a docstring gets its signature for one; an algorithm's is its module's.
    doc = sys.modules[value.__module__].__doc__ if value in REGISTRY.values() else inspect.getdoc(value)
    assert doc and not doc.startswith(f"{name}(")
    assert f"`{name}" in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REGISTRY)
def test_algorithm_has_a_page_with_its_options(name):
    page = (ROOT / f"docs/algorithms/{name}.md").read_text(encoding="utf-8")
    assert f"\n{options_table(REGISTRY[name])}\n" in page
    assert page.startswith(f"# {REGISTRY[name].title}")
    for section in ("A round", "What is sent", "Options", "Where it differs"):
        assert f"\n## {section}" in page
    for overview in (README, GUIDE):
        assert f"algorithms/{name}.md" in overview.read_text(encoding="utf-8")


@pytest.mark.parametrize("overview", [README, GUIDE], ids=lambda page: page.name)
def test_overview_says_how_to_add_an_algorithm(overview):
    assert "design.md#add-an-algorithm)" in overview.read_text(encoding="utf-8")


def test_no_page_for_an_algorithm_that_is_not_there():
    assert {page.stem for page in (ROOT / "docs/algorithms").glob("*.md")} == set(REGISTRY)


def test_design_page_shows_every_room():
    _, _, section = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("## The rooms")
    shown = re.findall(r"`(\w+(?:\.py|/))`", section.partition("\n## ")[0])
    package = ROOT / "src/manyheads"
    rooms = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(shown) == sorted([*rooms, *(path.name for path in package.glob("[!_]*.py"))])


def test_the_class_of_algorithms_explains_all_that_one_may_state():
    """The design page leaves it to the class."""
    (body,) = ast.parse(inspect.getsource(Algorithm)).body
    assert isinstance(body, ast.ClassDef)
    for stated, text in itertools.pairwise(body.body):
        if isinstance(stated, ast.AnnAssign):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), ast.unparse(stated)


def test_guide_defines_every_field_of_a_record():
    _, _, section = GUIDE.read_text(encoding="utf-8").partition("### Every field")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    defined = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert defined == [spec.name for spec in fields(Record) if spec.name != "per_worker"]


@pages
def test_commands_are_understood(page, monkeypatch):
    asked = []
    for module in COMMANDS:
        monkeypatch.setattr(module, "run", asked.append)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands(page):
        assert "compare" not in words or "--out" in words, "compare keeps its runs in a folder"
        asked.clear()
        match words:
            case ["make", target]:
                assert target in targets
            case ["python", script, *_] if script.endswith(".py"):
                assert (ROOT / script).exists()
            case ["manyheads" | "torchrun", *argv]:
                assert cli.main(argv[argv.index("-m") + 2 :] if words[0] == "torchrun" else argv) == 0, words
                if asked and "source" in asked[0] and asked[0].source is None:
                    assert experiments(asked[0])
            case [tool, *_]:
                assert tool in ("git", "cd", "pip", "export", ".")


@pages
def test_options_exist(page, capsys):
    def flags(*command: str) -> set[str]:
        assert cli.main([*command, "--help"]) == 0
        text = capsys.readouterr().out
        inner = re.search(r"^commands:\n(.*?)(\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        names = re.findall(r"^    ([\w-]+)", inner[1], re.MULTILINE) if inner else []
        return set(re.findall(r"--[a-z][\w-]*", text)).union(*(flags(*command, name) for name in names))

    shown = re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text(encoding="utf-8"))
    assert set(shown) <= flags() | FOREIGN_FLAGS


@pages
def test_links_resolve(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize(
    "words",
    [
        ["own_model.py"],
        ["own_algorithm.py", "train", "dfedper", "--epochs", "1", "--workers", "4", "--rounds", "1", "--out", "a"],
    ],
    ids=lambda words: words[0],
)
def test_example_runs(words, tmp_path):
    name, *argv = words
    # In a process of its own, as an algorithm that is registered stays so.
    command = [sys.executable, str(ROOT / "examples" / name), *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_every_example_is_shown_as_it_is():
    shown = [block for page in PAGES for block in blocks(page, "python")]
    assert EXAMPLES and all(example.read_text(encoding="utf-8") in shown for example in EXAMPLES)


def test_design_page_runs_and_its_algorithms_are_at_home_on_the_command_line(tmp_path):
    page = blocks(ROOT / "docs/design.md", "python")
    (tmp_path / "mine.py").write_text("\n".join([*page, "REGISTRY[DpFedMe.name] = DpFedMe"]), encoding="utf-8")
    few = ["--workers", "4", "--out"]
    both = (["train", "d-pfedme", "--pull", "2", "--rounds", "1", *few, "a"], ["join", "a", *few, "b"])
    command = [sys.executable, "-c", f"import mine, sys; sys.exit(max(map(mine.main, {both})))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "D-pFedMe on digits" in done.stdout and "New workers on digits" in done.stdout


def test_the_tutorial_s_forty_lines_end_with_the_same_weights(tmp_path, monkeypatch, capsys):
    """Its last block but one asserts that; here, that the accuracies it prints are those that it speaks of."""
    run_blocks(TUTORIAL, tmp_path, monkeypatch)
    ours, by_hand, local, d_psgd = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert ours == by_hand
    page = " ".join(TUTORIAL.read_text().split())
    assert f"reaches {ours:.2f}, the others {local:.2f} and {d_psgd:.2f}" in page
    assert len(SEEDS) == 4 and "Four seeds, rates tuned" in page


def test_guide_runs_and_names_every_file_of_a_run(tmp_path, monkeypatch):
    walks = 'person,steps,speed,class\nann,1,,"to, work"\n#2,3,2,home\nann,,6,home\n'
    (tmp_path / "walks.csv").write_text(walks, encoding="utf-8")
    for kind in ("cat.jpg", "dog.png"):
        (tmp_path / "photos" / kind[:3]).mkdir(parents=True)
        Image.new("RGB", (50, 40), "red").save(tmp_path / "photos" / kind[:3] / kind)
    (tmp_path / "photos" / "dog" / ".hidden").touch()
    defined = run_blocks(GUIDE, tmp_path, monkeypatch)
    walks, photos, *about = (np.load(f"{name}.npz") for name in ("walks", "photos", "walks-about", "photos-about"))
    assert walks["x"].tolist() == [[-1, 0], [1, -1], [0, 1]] and walks["user"].tolist() == ["ann", "#2", "ann"]
    assert photos["x"].shape == (2, 3, 32, 32)
    assert [part["y"].tolist() for part in (walks, photos)] == [[1, 0, 0], [0, 1]]
    assert [part["classes"].tolist() for part in about] == [["home", "to, work"], ["cat", "dog"]]
    assert (about[0]["mean"].tolist(), about[0]["std"].tolist()) == ([2, 4], [1, 2])
    shutil.copy("my.npz", "theirs.npz")
    for words in commands(GUIDE):
        if "runs/mine" in words:
            assert cli.main(words[1:]) == 0, words
    defined["mlp"].load_state_dict(load_file("model.safetensors"))
    x = torch.from_numpy(np.load("my.npz")["x"])
    assert torch.allclose(defined["mlp"](x), manyheads.Run.open("runs/mine").model(3)(x)), "as it was exported"
    ours = NETS["cnn"]((3, 32, 32), 2)
    defined["cnn"].load_state_dict(ours.state_dict())
    x = torch.from_numpy(photos["x"] / np.float32(255))
    assert torch.allclose(defined["cnn"](x), ours(x))
    left = {path.name for path in (tmp_path / "runs/mine").iterdir() if not path.name.startswith(".")}
    _, _, section = GUIDE.read_text(encoding="utf-8").partition("## The run directory")
    named = set(re.findall(r"`([\w.]+)/?`", section.partition("\n### ")[0]))
    assert left <= named


def test_pictures_are_small():
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < 200_000
