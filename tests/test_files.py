import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from manyheads.errors import UserError
from manyheads.files import (
    locked,
    read_sealed,
    replacing,
    sha256,
    write_atomically,
    write_sealed,
    write_tensors,
)
from manyheads.tree import as_bytes

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*a\.json: No space left on device\. .*elsewhere") as caught:
        write_tensors(path, {"x": torch.zeros(3)})
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path()):
        with pytest.raises(UserError, match=r"cannot write .*: Is a directory\."):
            write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == []


def test_new_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=6))
def test_tensors_are_read_back_by_the_library(tmp_path_factory: pytest.TempPathFactory, leaves: list) -> None:
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    tensors = {}
    for number, (dtype, shape, transposed) in enumerate(leaves):
        leaf = torch.randint(0, 2, shape).to(dtype)
        tensors[f"leaf é {number}"] = leaf.mT if transposed and leaf.ndim >= 2 else leaf
    digest = write_tensors(path, tensors, {"note": "ü"})
    found = load_file(path)
    assert digest == sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.keys() == tensors.keys()
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, leaf in tensors.items():
        assert header[name]["data_offsets"][0] % leaf.element_size() == 0
        assert found[name].dtype == leaf.dtype
        assert torch.equal(found[name], leaf)


def test_a_leaf_is_hashed_before_the_next_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU each is a copy: were they to wait for the hash, the host would hold them all."""

    class Slow:
        hashed = 0

        def update(self, _: object) -> None:
            time.sleep(0.02)
            self.hashed += 1

        def hexdigest(self) -> str:
            return ""

    slow, found = Slow(), []

    def fetched(leaf: torch.Tensor) -> memoryview:
        found.append(slow.hashed)
        return as_bytes(leaf)

    monkeypatch.setattr(hashlib, "sha256", lambda: slow)
    monkeypatch.setattr("manyheads.files.as_bytes", fetched)
    write_tensors(tmp_path / "t", {name: torch.ones(2) for name in "abc"})
    assert found == [1, 2, 3], "the header first"


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    leaf = torch.arange(6.0).view(2, 3)
    write_tensors(tmp_path / "x", {"a": leaf, "b": leaf, "c": leaf[:1].expand(4, 3)})
    found = load_file(tmp_path / "x")
    assert torch.equal(found["b"], leaf)
    assert torch.equal(found["c"], leaf[:1].expand(4, 3))


def test_tensors_are_read_back_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path, tensors = tmp_path / "t.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}
    assert read_sealed(path) is None
    write_tensors(path, tensors)
    with pytest.raises(UserError, match=r"t.safetensors is damaged: put the file back"):
        read_sealed(path)
    write_sealed(path, tensors)
    found = read_sealed(path)
    assert found is not None and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], leaf) for name, leaf in tensors.items())
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    with pytest.raises(UserError, match=r"t.safetensors cannot be read .*: put the file back"):
        read_sealed(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"t.safetensors is damaged: put the file back"):
        read_sealed(path)


def test_one_number_of_one_worker(tmp_path: Path) -> None:
    """As a counter of batches that a process with a single worker has."""
    write_tensors(tmp_path / "t", {"expanded": torch.tensor(7).expand(1), "none": torch.zeros(0, 3)})
    found = load_file(tmp_path / "t")
    assert found["expanded"].tolist() == [7] and found["none"].shape == (0, 3)


HOLD = """
import sys, time
from pathlib import Path
from manyheads.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, env=env) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match="another run is writing to"), locked(tmp_path):
                pytest.fail("two processes hold one folder")
        finally:
            other.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        pass
