import json
from pathlib import Path

import pytest

from manyheads.report import latex
from manyheads.report.comparison import open_comparison
from manyheads.report.numbers import Stat


def test_a_row_a_system_a_column_a_setting(tmp_path: Path, write_run):
    for split in ("iid", "shards:2"):
        for seed in (1, 2):
            write_run(tmp_path / f"deprl {split} {seed}", "deprl", {"head_epochs": 2}, split=split, seed=seed)
            write_run(tmp_path / f"own {split} {seed}", "deprl", {"head_epochs": 3}, split=split, seed=seed, level=0.5)
    comparison = open_comparison(tmp_path)
    about, (begin, top, head, _, first, second, _, floor, bottom, end) = _parts(latex.tabular(comparison))
    assert (begin, top, bottom, end) == (r"\begin{tabular}{lrr}", r"\toprule", r"\bottomrule", r"\end{tabular}")
    assert head == r"split & iid & shards:2 \\"
    assert first.startswith(r"DePRL, head epochs 2 & $\mathbf{") and first.count(r"\mathbf") == 2
    assert second.startswith("DePRL, head epochs 3 & $") and "mathbf" not in second
    assert floor == r"majority floor & $56.5 \pm 0.7$ & $56.5 \pm 0.7$ \\"
    assert "accuracy in percent" in about and r"2 seeds; \pm is the sample deviation (n - 1)" in about
    assert "Local work in a round: 3 passes (DePRL, head epochs 2); 4 passes (DePRL, head epochs 3)." in about


def test_a_regressions_scores_are_not_in_percent(tmp_path: Path, write_run):
    path = write_run(tmp_path / "a") / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "majority_floor": None}))
    about, _ = _parts(latex.tabular(open_comparison(tmp_path)))
    assert "Numbers: score after the last round" in about and "percent" not in about


def test_what_is_equal_as_printed_is_as_bold(tmp_path: Path, write_run):
    for head_epochs, accuracy in ((1, 0.9001), (2, 0.9003), (3, 0.899)):
        path = write_run(tmp_path / f"{head_epochs}", "deprl", {"head_epochs": head_epochs}) / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "accuracy_mean": accuracy}))
    _, lines = _parts(latex.tabular(open_comparison(tmp_path)))
    cells = [line.split(" & ")[1] for line in lines if line.startswith("DePRL")]
    assert cells == [r"$\mathbf{90.0}$ \\", r"$\mathbf{90.0}$ \\", r"$89.9$ \\"]


def test_bold_is_what_is_best_over_the_seeds_that_all_have(tmp_path: Path, write_run):
    for algorithm, seed, level in (("deprl", 1, 0.75), ("deprl", 2, 0.5), ("d-psgd", 2, 0.6), ("d-psgd", 3, 0.55)):
        write_run(tmp_path / f"{algorithm}{seed}", algorithm, seed=seed, level=level)
    _, lines = _parts(latex.tabular(open_comparison(tmp_path)))
    deprl, d_psgd = (line for line in lines if line.startswith("D"))
    assert "mathbf" not in deprl and r"D-PSGD & $\mathbf{" in d_psgd


def test_seeds_that_differ_are_not_one(tmp_path: Path, write_run):
    write_run(tmp_path / "a", "deprl", seed=1)
    write_run(tmp_path / "b", "d-psgd", seed=2)
    about, lines = _parts(latex.tabular(open_comparison(tmp_path)))
    assert "One seed each, not the same one." in about and "mathbf" not in "".join(lines)


def test_a_single_run_has_neither_deviation_nor_best(tmp_path: Path, write_run):
    write_run(tmp_path / "a")
    about, lines = _parts(latex.tabular(open_comparison(tmp_path)))
    assert lines[2] == r"system & accuracy, \% \\"
    assert "pm" not in "".join(lines) and "mathbf" not in "".join(lines)
    assert "single seed" in about and "Bold" not in about


def test_whatever_comes_from_a_file_is_text(tmp_path: Path, write_run):
    run = write_run(tmp_path / "a")
    description = json.loads((run / "experiment.json").read_text())
    description["algorithm"]["name"] = "50%_of\n\n$x^2$ & \\input{a}~#[1]"
    (run / "experiment.json").write_text(json.dumps(description))
    shown = r"50\%\_of \$x\textasciicircum{}2\$ \& \textbackslash{}input\{a\}\textasciitilde{}\#{[}1] & $"
    assert any(line.startswith(shown) for line in latex.tabular(open_comparison(tmp_path)).splitlines())


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "--"),
        (Stat(-0.5, 0.0, 2), r"$-0.5 \pm 0$"),
        (Stat(1234.0, None, 1), r"$1.23 \cdot 10^{3}$"),
    ],
)
def test_cells(found: Stat | None, text: str):
    assert latex._cell(found, lambda value: f"{value:.3g}") == text


def _parts(table: str) -> tuple[str, list[str]]:
    """The comment, and the lines after it."""
    lines = table.splitlines()
    about = [line for line in lines if line.startswith("% ")]
    return "\n".join(about), lines[len(about) :]
