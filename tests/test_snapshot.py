"""The files of one checkpoint, made by others too; what processes do with them is tested in test_checkpoint.py."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from manyheads.errors import UserError
from manyheads.files import sha256
from manyheads.snapshot import (
    Damaged,
    Manifest,
    Snapshot,
    _fingerprint,
    _seal,
    covers,
    finish,
    read,
    verify,
    write_rows,
    written_rows,
)

NUM_WORKERS = 12
NAME = "rows-00000-00011.safetensors"


def checkpoint(place: Path) -> Manifest:
    """A complete one of round 12, written by one process."""
    place.mkdir(exist_ok=True)
    counts = np.arange(NUM_WORKERS)
    state = Snapshot(12, {"head": torch.rand(NUM_WORKERS, 2)}, {}, counts, counts, 100, 1.5)
    write_rows(place, state, range(NUM_WORKERS), "0")
    manifest = Manifest("abc", 12, NUM_WORKERS, "0", 1.5, written_rows(place, "0"))
    finish(place, manifest)
    return manifest


def test_blocks_cover_the_workers_if_each_is_in_one() -> None:
    assert covers([range(3), range(3, 12)], 12)
    for blocks in ([range(3), range(4, 12)], [range(4), range(3, 12)], [range(3), range(3, 11)], [range(3, 12)], []):
        assert not covers(blocks, 12)


def test_no_file_outside_of_its_folder_is_read(tmp_path: Path) -> None:
    """Even if the file is the one that was hashed, and the manifest is sealed."""
    place = tmp_path / "round-000012"
    manifest = checkpoint(place)
    there = f"../elsewhere/{NAME}"
    shutil.copytree(place, tmp_path / "elsewhere")
    (place / "manifest.json").write_bytes(_seal(replace(manifest, files=(replace(manifest.files[0], name=there),))))
    with pytest.raises(Damaged, match=rf"^manifest\.json names {there}, which is not in its folder$"):
        verify(place, 12, None)


def _sealed_again(folder: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest, and seal it as if it had been written so."""
    path = folder / "manifest.json"
    values = json.loads(path.read_bytes())
    del values["sha256"]
    change(values)
    for rows in values["files"] if isinstance(values["files"], list) else ():
        rows |= {"sha256": sha256(folder / rows["name"])} if (folder / str(rows.get("name"))).is_file() else {}
    path.write_text(json.dumps({**values, "sha256": _fingerprint(values)}))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda values, it=it: values.update(it) for it in ({"seconds": "1"}, {"num_workers": "12"}, {"files": 1})),
        *(lambda values, it=it: values.update({"num_workers": it}) for it in (11, 10**400)),
        *(
            lambda values, it=it: values["files"][0].update(it)
            for it in (
                {"first": -1},
                {"first": 1},
                {"stop": None},
                {"stop": 2**62},
                {"on_wire": "0"},
                {"name": "\ud800"},
            )
        ),
        lambda values: values["files"].append(values["files"][0]),
        lambda values: values.update(run=1),
    ],
)
def test_a_sealed_manifest_of_somebody_else_is_looked_through(tmp_path: Path, change: Callable[[dict], object]) -> None:
    checkpoint(tmp_path)
    verify(tmp_path, 12, None)
    _sealed_again(tmp_path, change)
    with pytest.raises(Damaged, match=r"^manifest\.json "):
        verify(tmp_path, 12, None)


ROWS = {name: torch.zeros(NUM_WORKERS) for name in ("params.head", "sent", "received")}
ABOUT = {"params": '["head"]', "buffers": "[]", "simulated_seconds": "1.5"}


@pytest.mark.parametrize(
    ("rows", "about"),
    [
        *(({**ROWS, name: torch.zeros(shape)}, ABOUT) for name in ROWS for shape in ((), (0,), (NUM_WORKERS - 1,))),
        ({**ROWS, "sent": torch.zeros(NUM_WORKERS, 1)}, ABOUT),
        *(({other: ROWS[other] for other in ROWS if other != name}, ABOUT) for name in ROWS),
        *((ROWS, {name: text for name, text in ABOUT.items() if name != gone}) for gone in ABOUT),
        *((ROWS, {**ABOUT, name: text}) for name in ABOUT for text in ("", "null", '{"head": 1}', "[" * 100_000)),
        (ROWS, None),
    ],
)
def test_sealed_rows_of_somebody_else_are_refused_in_one_line(
    tmp_path: Path, rows: dict[str, torch.Tensor], about: dict[str, str] | None
) -> None:
    checkpoint(tmp_path)
    save_file(ROWS, tmp_path / NAME, ABOUT)
    _sealed_again(tmp_path, lambda _: None)
    assert read(tmp_path, verify(tmp_path, 12, None), range(NUM_WORKERS)).params.keys() == {"head"}
    save_file(rows, tmp_path / NAME, about)
    _sealed_again(tmp_path, lambda _: None)
    manifest = verify(tmp_path, 12, None)
    with pytest.raises(UserError, match=r" is no checkpoint of this run \(.*\): put it back") as caught:
        read(tmp_path, manifest, range(NUM_WORKERS))
    assert "\n" not in str(caught.value)


def test_having_no_memory_is_no_fault_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = checkpoint(tmp_path)

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(torch.OutOfMemoryError):
        read(tmp_path, manifest, range(NUM_WORKERS))
