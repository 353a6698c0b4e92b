import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.checkpoint import Checkpoints, latest_round, newest, place_of
from manyheads.errors import UserError
from manyheads.snapshot import Snapshot, read

NUM_WORKERS = 12


def snapshot(round: int, workers: range = range(NUM_WORKERS)) -> Snapshot:
    """A state that differs in every worker and round; the names are not in alphabetical order."""
    g = torch.Generator().manual_seed(round)
    params = {
        "representation.2.weight": torch.randn(NUM_WORKERS, 3, 2, generator=g),
        "representation.0.weight": torch.randn(NUM_WORKERS, 5, generator=g, dtype=torch.float64),
        "head.bias": torch.randn(NUM_WORKERS, 1, generator=g),
    }
    buffers = {
        "representation.1.running_mean": torch.randn(NUM_WORKERS, 2, generator=g),
        "representation.1.num_batches_tracked": torch.arange(NUM_WORKERS) + round,
        "representation.0.kept": torch.rand(NUM_WORKERS, 3, generator=g) < 0.5,
    }
    here = slice(workers.start, workers.stop)
    sent = np.arange(NUM_WORKERS, dtype=np.int64) * round
    own = [{name: leaf[here] for name, leaf in tree.items()} for tree in (params, buffers)]
    return Snapshot(round, *own, sent[here], sent[here] + 1, 100 * len(workers), round / 8)


def same(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots are equal, up to how ``on_wire`` is spread over processes."""
    trees = ((a.params, b.params), (a.buffers, b.buffers))
    return (
        all(list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one) for one, two in trees)
        and np.array_equal(a.sent, b.sent)
        and np.array_equal(a.received, b.received)
        and (a.round, a.seconds, a.simulated_seconds) == (b.round, b.seconds, b.simulated_seconds)
    )


def blocks(num_ranks: int) -> list[range]:
    bounds = [NUM_WORKERS * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def processes(folder: Path, num_ranks: int, generation: str = "0", patience: float = 0.0) -> list[Checkpoints]:
    return [
        Checkpoints(
            folder,
            run_id="abc",
            num_workers=NUM_WORKERS,
            workers=workers,
            rank=rank,
            num_ranks=num_ranks,
            generation=generation,
            patience=patience,
        )
        for rank, workers in enumerate(blocks(num_ranks))
    ]


def save_all(ranks: list[Checkpoints], *rounds: int) -> None:
    for round in rounds:
        for checkpoints in ranks:
            checkpoints.write_rows(snapshot(round, checkpoints.workers))
        ranks[0].complete(round, snapshot(round).seconds)


def single(folder: Path, *rounds: int) -> Checkpoints:
    """Of a process alone, which has saved these rounds."""
    (checkpoints,) = processes(folder, 1)
    save_all([checkpoints], *rounds)
    return checkpoints


def loaded_round(checkpoints: Checkpoints) -> int | None:
    found, _ = checkpoints.load()
    assert found is None or same(found, snapshot(found.round, checkpoints.workers))
    return None if found is None else found.round


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    assert single(tmp_path / "checkpoint").load() == (None, [])
    assert newest(tmp_path / "nowhere") == (None, [])


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 12)
    found, notes = checkpoints.load()
    assert found is not None
    assert same(found, snapshot(12))
    assert found.on_wire == snapshot(12).on_wire
    assert notes == []


def test_leaves_keep_their_order_because_sums_over_them_depend_on_it(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 1)
    found, _ = checkpoints.load()
    assert found is not None
    assert list(found.params) == list(snapshot(1).params) != sorted(snapshot(1).params)


def test_a_loaded_state_owns_its_memory(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 1)
    found, _ = checkpoints.load()
    assert found is not None
    found.params["head.bias"].zero_()
    assert loaded_round(checkpoints) == 1
    found, _ = checkpoints.load()
    (rows,) = tmp_path.rglob("*.safetensors")
    with rows.open("r+b") as file:
        file.write(bytes(rows.stat().st_size))
    assert found is not None
    assert same(found, snapshot(1))


def test_the_last_two_are_kept_in_the_layout_of_the_docs(tmp_path: Path) -> None:
    single(tmp_path, 4, 8, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000008", "round-000012"]
    files = sorted(path.name for path in (tmp_path / "round-000012").iterdir())
    assert files == ["manifest.json", "rows-00000-00011.safetensors"]
    manifest = json.loads((tmp_path / "round-000012" / "manifest.json").read_text())
    assert manifest["run_id"] == "abc"
    assert (manifest["round"], manifest["num_workers"], manifest["generation"]) == (12, NUM_WORKERS, "0")
    assert latest_round(tmp_path) == 12


def test_no_later_round_is_loaded_than_asked_for(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 4, 8)
    for at_most, expected in ((9, 8), (8, 8), (7, 4), (3, None)):
        found, notes = checkpoints.load(at_most)
        assert (found and found.round, notes) == (expected, [])


def test_any_number_of_processes_goes_on_from_any_other(tmp_path: Path) -> None:
    save_all(processes(tmp_path, 4), 1)
    wire = sum(snapshot(1, workers).on_wire for workers in blocks(4))
    for round, num_ranks in enumerate((2, 3, 1, 5), start=2):
        ranks = processes(tmp_path, num_ranks)
        found = [checkpoints.load()[0] for checkpoints in ranks]
        for checkpoints, part in zip(ranks, found, strict=True):
            assert part is not None
            assert same(part, snapshot(round - 1, checkpoints.workers))
        assert sum(part.on_wire for part in found if part is not None) == wire
        save_all(ranks, round)


@given(st.sets(st.integers(1, NUM_WORKERS - 1)), st.sets(st.integers(1, NUM_WORKERS - 1)))
@settings(max_examples=25, deadline=None)
def test_any_blocks_are_read_from_any_others(
    tmp_path_factory: pytest.TempPathFactory, written: set[int], wanted: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")

    def cut(at: set[int]) -> list[range]:
        bounds = [0, *sorted(at), NUM_WORKERS]
        return [range(a, b) for a, b in pairwise(bounds)]

    for rank, workers in enumerate(cut(written)):
        part = Checkpoints(
            folder, run_id="abc", num_workers=NUM_WORKERS, workers=workers, rank=rank, num_ranks=len(written) + 1
        )
        part.write_rows(snapshot(3, workers))
    Checkpoints(
        folder, run_id="abc", num_workers=NUM_WORKERS, workers=cut(written)[0], num_ranks=len(written) + 1
    ).complete(3, snapshot(3).seconds)
    manifest, _ = newest(folder)
    assert manifest is not None
    parts = [read(place_of(folder, manifest.round), manifest, workers) for workers in cut(wanted)]
    assert all(same(part, snapshot(3, workers)) for part, workers in zip(parts, cut(wanted), strict=True))
    assert sum(part.on_wire for part in parts) == 100 * NUM_WORKERS


def test_rows_without_a_manifest_are_no_checkpoint(tmp_path: Path) -> None:
    ranks = processes(tmp_path, 2)
    save_all(ranks, 4)
    for checkpoints in ranks:
        checkpoints.write_rows(snapshot(8, checkpoints.workers))
    found, notes = ranks[0].load()
    assert found is not None
    assert (found.round, notes) == (4, [])


def test_a_checkpoint_is_not_completed_while_rows_are_missing(tmp_path: Path) -> None:
    ranks = processes(tmp_path, 3)
    save_all(ranks, 4)
    for checkpoints in (ranks[0], ranks[2]):
        checkpoints.write_rows(snapshot(8, checkpoints.workers))
    with pytest.raises(UserError, match="rows of 2 of 3 processes"):
        ranks[0].complete(8, 1.0)
    assert latest_round(tmp_path) == 4


def test_rows_that_leave_a_worker_out_are_no_checkpoint(tmp_path: Path) -> None:
    for rank, workers in enumerate((range(6), range(7, NUM_WORKERS))):
        part = Checkpoints(tmp_path, run_id="abc", num_workers=NUM_WORKERS, workers=workers, rank=rank, num_ranks=2)
        part.write_rows(snapshot(4, workers))
    with pytest.raises(UserError, match="choose an --out on a disk that all of them see"):
        processes(tmp_path, 2)[0].complete(4, 1.0)
    assert latest_round(tmp_path) == 0


def test_what_a_process_that_is_ahead_is_writing_is_left_alone(tmp_path: Path) -> None:
    ranks = processes(tmp_path, 2)
    ranks[1].write_rows(snapshot(8, ranks[1].workers))
    save_all(ranks, 4)
    ranks[0].write_rows(snapshot(8, ranks[0].workers))
    ranks[0].complete(8, snapshot(8).seconds)
    assert loaded_round(single(tmp_path)) == 8


def test_a_checkpoint_under_the_name_of_another_round_is_damaged(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 4)
    shutil.copytree(tmp_path / "round-000004", tmp_path / "round-000009")
    found, notes = checkpoints.load()
    assert found is not None and same(found, snapshot(4))
    assert notes == ["checkpoint of round 9 is damaged (manifest.json is of round 4): continuing from round 4"]


def test_what_waits_for_a_checkpoint_may_be_damaged(tmp_path: Path) -> None:
    checkpoints = single(tmp_path)
    checkpoints.write_rows(snapshot(4))
    for name, content in (("rows-1.json", b"{"), ("rows-2.json", b'{"generation": "0"}')):
        (tmp_path / "round-000004" / name).write_bytes(content)
    checkpoints.complete(4, snapshot(4).seconds)
    assert loaded_round(checkpoints) == 4


def test_a_million_rounds_are_no_end(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 999_999, 1_000_000)
    assert loaded_round(checkpoints) == 1_000_000


def test_an_earlier_generation_can_write_nothing_more(tmp_path: Path) -> None:
    old = processes(tmp_path, 2, generation="first")
    old[0].load()
    save_all(old, 4)
    for checkpoints in old:
        checkpoints.write_rows(snapshot(8, checkpoints.workers))
    new = processes(tmp_path, 2, generation="second")
    assert new[0].load()[0] is not None
    with pytest.raises(UserError, match="taken over"):
        old[0].complete(8, 1.0)
    with pytest.raises(UserError, match="taken over"):
        old[1].write_rows(snapshot(8, old[1].workers))
    assert latest_round(tmp_path) == 4


def test_rows_of_an_earlier_generation_never_enter_a_checkpoint(tmp_path: Path) -> None:
    old = processes(tmp_path, 3, generation="first")
    old[0].load()
    for checkpoints in old:
        checkpoints.write_rows(snapshot(7, checkpoints.workers))
    new = processes(tmp_path, 2, generation="second")
    new[0].load()
    new[0].write_rows(snapshot(7, new[0].workers))
    with pytest.raises(UserError, match="rows of 1 of 2 processes"):
        new[0].complete(7, 1.0)
    save_all(new, 7)
    assert len(list((tmp_path / "round-000007").iterdir())) == 3
    assert loaded_round(single(tmp_path)) == 7


def test_files_may_take_a_while_to_show_on_another_host(tmp_path: Path) -> None:
    first, second = processes(tmp_path, 2, patience=30)
    impatient = processes(tmp_path, 2)[1]
    with pytest.raises(UserError, match="process 1 does not see what process 0 writes"):
        impatient.load()
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(second.load)
        first.load()
        assert loading.result(30) == (None, [])
        first.write_rows(snapshot(3, first.workers))
        completing = pool.submit(first.complete, 3, snapshot(3).seconds)
        second.write_rows(snapshot(3, second.workers))
        completing.result(30)
    assert loaded_round(single(tmp_path)) == 3


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    save_all([single(tmp_path)], 4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = Checkpoints(tmp_path, run_id="xyz", num_workers=NUM_WORKERS, workers=range(NUM_WORKERS))
    with pytest.raises(UserError, match="belongs to run abc, but this is run xyz"):
        other.load()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert loaded_round(single(tmp_path)) == 4


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated rows": ("rows-00000-00011.safetensors", _truncate, "sha mismatch in rows-00000-00011.safetensors"),
    "missing rows": ("rows-00000-00011.safetensors", Path.unlink, "rows-00000-00011.safetensors: No such file"),
    "truncated manifest": ("manifest.json", _truncate, "manifest.json cannot be read"),
    "empty manifest": ("manifest.json", _empty, "manifest.json cannot be read"),
    "another JSON": ("manifest.json", lambda path: path.write_text("[1]") and None, "manifest.json cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_falls_back_to_the_checkpoint_before_and_says_so(tmp_path: Path, case: str) -> None:
    name, harm, reason = DAMAGE[case]
    checkpoints = single(tmp_path, 8, 12)
    harm(tmp_path / "round-000012" / name)
    found, notes = checkpoints.load()
    assert found is not None
    assert same(found, snapshot(8))
    assert len(notes) == 1
    assert notes[0].startswith(f"checkpoint of round 12 is damaged ({reason}")
    assert notes[0].endswith("): continuing from round 8")


def test_a_process_looks_only_at_what_it_reads(tmp_path: Path) -> None:
    ranks = processes(tmp_path, 2)
    save_all(ranks, 8, 12)
    _truncate(tmp_path / "round-000012" / "rows-00006-00011.safetensors")
    assert [loaded_round(checkpoints) for checkpoints in ranks] == [12, 8]
    assert ranks[0].load()[1] == [] != ranks[1].load()[1]
    assert loaded_round(single(tmp_path)) == 8
    manifest, _ = newest(tmp_path)
    assert manifest is not None and manifest.round == 8


def test_when_all_are_damaged_the_run_starts_over(tmp_path: Path) -> None:
    checkpoints = single(tmp_path)
    for round in (8, 12):
        save_all([checkpoints], round)
        _empty(tmp_path / f"round-{round:06d}" / "rows-00000-00011.safetensors")
    found, notes = checkpoints.load()
    assert found is None
    assert len(notes) == 2
    assert all(note.endswith("continuing from round 0") for note in notes)


def test_after_a_fall_back_the_damaged_one_makes_way(tmp_path: Path) -> None:
    checkpoints = single(tmp_path, 8, 12)
    _empty(tmp_path / "round-000012" / "manifest.json")
    assert loaded_round(checkpoints) == 8
    save_all([checkpoints], 9)
    assert checkpoints.load()[1] == []
    assert sorted(path.name for path in tmp_path.glob("round-*")) == ["round-000008", "round-000009"]


def test_what_cannot_be_deleted_stops_no_run_and_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    checkpoints = single(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        save_all([checkpoints], 4, 8, 12)
    assert [path.name for path in (tmp_path / "round-000004").iterdir()] == ["rows-00000-00011.safetensors"]
    save_all([checkpoints], 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000012", "round-000016"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    checkpoints = single(tmp_path_factory.mktemp("saved"))
    save_all([checkpoints], 8, 12)
    return checkpoints


@given(
    st.sampled_from(["rows-00000-00011.safetensors", "manifest.json"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_never_changes_what_is_loaded(saved: Checkpoints, name: str, where: float, flip: int) -> None:
    path = saved.folder / "round-000012" / name
    content = path.read_bytes()
    broken = bytearray(content)
    broken[int(where * len(content))] ^= flip
    path.write_bytes(broken)
    try:
        found, notes = saved.load()
    finally:
        path.write_bytes(content)
    assert found is not None
    assert same(found, snapshot(found.round))
    # Another blank between two values of the manifest is no damage.
    assert (found.round, len(notes)) == (8, 1) or (name == "manifest.json" and (found.round, notes) == (12, []))


def test_no_digit_of_a_manifest_can_be_changed(saved: Checkpoints) -> None:
    path = saved.folder / "round-000012" / "manifest.json"
    content = path.read_bytes()
    try:
        for at in (at for at, byte in enumerate(content) if chr(byte).isdigit()):
            digit = b"%d" % ((content[at] - ord("0") + 1) % 10)
            path.write_bytes(content[:at] + digit + content[at + 1 :])
            manifest, notes = newest(saved.folder)
            assert manifest is not None
            assert (manifest.round, len(notes)) == (8, 1)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("at", range(6))
def test_a_full_disk_keeps_the_former_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    checkpoints = single(tmp_path, 4, 8)
    fsync, calls = os.fsync, iter(range(100))

    def full_disk(handle: int) -> None:
        if next(calls) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match="No space left on device") as caught:
            save_all([checkpoints], 12)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*/.*.part"))
    # The very last thing to fail is making the manifest's rename last: by then it has happened.
    assert loaded_round(checkpoints) == (12 if at == 5 else 8)
    assert (tmp_path / "round-000004" / "manifest.json").exists()
    save_all([checkpoints], 12)
    assert loaded_round(checkpoints) == 12


KILLED_AT_EVERY_STEP = """
    import os, shutil, signal, sys
    from pathlib import Path

    import test_checkpoint as t

    def save_and_die(folder, step):
        steps = 0

        def hook(event, args):
            nonlocal steps
            if event in STEPS:
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1

        sys.addaudithook(hook)
        t.save_all([t.single(folder)], 12)
        os._exit(0)

    STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
    start, step, found = Path(sys.argv[1]) / "start", 0, []
    for round in (4, 8):
        t.save_all([t.single(start)], round)
    while True:
        folder = Path(sys.argv[1]) / f"step-{step}"
        shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:
            save_and_die(folder, step)
        _, status = os.waitpid(child, 0)
        state, notes = t.single(folder).load()
        assert notes == [], notes
        assert t.same(state, t.snapshot(state.round)), step
        found.append(state.round)
        left = Path(shutil.copytree(folder, folder.with_suffix(".copy")))
        while round := t.latest_round(left):
            assert t.newest(left)[1] == [], (step, round)
            shutil.rmtree(left / f"round-{round:06d}")
        t.save_all([t.single(folder)], 16)
        kept = sorted(path.name for path in folder.glob("round-*"))
        assert kept == [f"round-{found[-1]:06d}", "round-000016"], kept
        assert len(list(folder.glob("round-000016/*"))) == 2
        if os.WIFEXITED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        step += 1
    assert found == sorted(found), found
    print(found.count(8), found.count(12))
"""


def test_a_process_killed_at_any_step_of_saving_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_AT_EVERY_STEP), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before >= 5
    assert after >= 3
