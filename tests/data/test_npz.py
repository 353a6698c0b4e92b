"""Files that are no npz, or a damaged one, end in one line, and nothing in them is unpickled."""

import errno
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from manyheads.data import load
from manyheads.data.npz import read_npz
from manyheads.errors import UserError

X = np.random.default_rng(0).normal(size=(50, 4))
Y = np.arange(50) % 5


def save(folder: Path, **content: np.ndarray) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **content)  # pyright: ignore[reportArgumentType]
    return path


def test_what_is_asked_for_is_read_and_the_rest_is_named(tmp_path: Path) -> None:
    found, unread = read_npz(save(tmp_path, x=X, users=Y), ("x", "y"))
    assert list(found) == ["x"] and np.array_equal(found["x"], X)
    assert unread == ["users"]


@pytest.mark.parametrize("keep", [0, 10, 100, 1000, -1])
def test_a_truncated_npz_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path, x=X, y=Y)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"mine\.npz is not an npz of plain arrays, or is damaged"):
        load(path)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged"):
        load(path)


@pytest.mark.parametrize(("place", "value"), [(8, 1), (10, 97)], ids=["encrypted", "an unknown compression"])
def test_an_npz_that_nobody_can_unpack_is_refused_by_name(tmp_path: Path, place: int, value: int) -> None:
    path = save(tmp_path, x=X, y=Y)
    content = bytearray(path.read_bytes())
    # Of the first entry in the list at an archive's end.
    content[content.index(b"PK\x01\x02") + place] = value
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged"):
        load(path)


def test_an_npy_is_not_an_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(
        UserError, match=r"x\.npy is not an npz .*\(not a zip archive\).* guide shows how to make one from CSV"
    ):
        load(tmp_path / "x.npy")


def test_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is a folder: give the path of an npz .* guide shows how to make one from CSV"
    ):
        load(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.npz")
    with pytest.raises(UserError, match=r"mine\.npz is a pipe or a device: give the path of an npz"):
        load(tmp_path / "mine.npz")


def test_a_file_that_cannot_be_opened_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.npz"
    path.symlink_to(path)
    with pytest.raises(UserError, match=r"^cannot read .*mine\.npz \(Too many levels of symbolic links\): fix that"):
        load(path)
    path.unlink()
    save(tmp_path, x=X, y=Y)

    # As for anybody but root after chmod 000.
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"^cannot read .*mine\.npz \(Permission denied\): fix that"):
        load(path)


def test_damage_anywhere_in_an_npz_is_told_without_advice_to_unpickle_it(tmp_path: Path) -> None:
    whole = save(tmp_path, x=X, y=Y).read_bytes()
    brace = whole.index(b"), }") + 3
    odd = io.BytesIO()
    with zipfile.ZipFile(odd, "w") as archive:
        archive.writestr("x", b"no array")
    for damaged in (whole[:brace] + b"{" + whole[brace + 1 :], b"?" + whole[1:], b"??" + whole, odd.getvalue()):
        (tmp_path / "mine.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"mine\.npz is not an npz of plain arrays, or is damaged") as error:
            load(tmp_path / "mine.npz")
        assert "allow_pickle" not in str(error.value)
