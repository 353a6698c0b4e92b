"""The public names, and what importing them costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import manyheads

SOURCE = Path(manyheads.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("networkx", "rich", "matplotlib", "jinja2", "polars", "pandas", "scipy")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_neither_the_public_names_nor_a_run_on_a_ring_need_more_than_the_core():
    code = f"""
import sys, manyheads
for name in manyheads.__all__:
    getattr(manyheads, name)
print([name for name in {HEAVY} if name in sys.modules])
runtime = manyheads.Runtime(device="cpu", threads=1)
(record,) = manyheads.train(manyheads.Experiment(workers=4, rounds=1), runtime)
assert record.accuracy_mean > 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).split("\n") == ["[]", "[]"]


def test_import_manyheads_alone_does_not_even_need_torch():
    assert python("import sys, manyheads; print('torch' in sys.modules)") == "False"


def test_on_windows_one_line_says_what_to_do():
    code = (
        "import sys; sys.platform = 'win32'\ntry:\n    import manyheads\nexcept ImportError as error:\n    print(error)"
    )
    assert python(code) == "manyheads needs Linux or macOS: on Windows, install and run it in WSL."


def test_names_that_are_not_loaded_yet_are_listed():
    names = python("import manyheads; print(*dir(manyheads))").split()
    assert {*manyheads.__all__, "__version__"} <= set(names)
    again = python("import manyheads; manyheads.DePRL; print(*dir(manyheads))").split()
    assert len(again) == len(set(again))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        manyheads.nonsense  # noqa: B018


def test_the_list_of_names_is_the_table_of_places():
    assert set(manyheads.__all__) == set(manyheads._PLACES)


def imported_at_the_top(tree: ast.Module) -> set[str]:
    """Names of packages that a module imports when it is imported itself."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is_for_and_imports_lightly(path):
    tree = ast.parse(path.read_text())
    first = (ast.get_docstring(tree) or "").split("\n\n")[0]
    assert first.endswith((".", ":", "::")), "a module opens with one sentence"
    allowed = {*sys.stdlib_module_names, "manyheads", "torch", "numpy", "safetensors"}
    if path.parent.name == "cuda_graphs":
        allowed.add("triton")  # which comes with torch where there are GPUs
    assert imported_at_the_top(tree) <= allowed
