import tempfile
from pathlib import Path

import pytest

import manyheads
from manyheads.network.restarts import announce, give_up

PROGRAM = Path(manyheads.__file__).with_name("__main__.py")


def test_who_gives_up_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MANYHEADS_GAVE_UP", "")
    give_up()
    first, second = announce(), announce()
    give_up()
    assert second.exists() and not first.exists()


@pytest.mark.parametrize(
    ("words", "gives_up"),
    [
        (("--lr", -1), True),
        (("--timeout", 1), False),
    ],
)
def test_mistakes_stay_and_absences_pass(start, tmp_path: Path, words: tuple[object, ...], gives_up: bool) -> None:
    """The second process looks for a first that never comes."""
    meeting = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}
    mark = tmp_path / "mark"
    process = start(PROGRAM, "train", "deprl", "--device", "cpu", *words, MANYHEADS_GAVE_UP=mark, **meeting)
    assert process.status() == 2
    assert mark.exists() == gives_up
