import tempfile
from pathlib import Path

import pytest

import manyheads
from manyheads.network.restarts import announce, give_up, met, restarted

PROGRAM = Path(manyheads.__file__).with_name("__main__.py")


def test_who_gives_up_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MANYHEADS_GAVE_UP", "")
    give_up()
    first, second = announce(), announce()
    give_up()
    assert second.exists() and not first.exists()


def test_a_restart_that_torchrun_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that stayed while another went must not be told that it was away."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for name in ("MANYHEADS_GAVE_UP", "MANYHEADS_MEETINGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert not restarted()
    announce()
    met()
    assert not restarted()
    met()
    assert restarted()
    announce()
    assert not restarted(), "another torchrun, started by one of its processes"


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
