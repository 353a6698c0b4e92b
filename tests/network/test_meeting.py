import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from manyheads.derived import pick_device
from manyheads.errors import UserError
from manyheads.network import meeting
from manyheads.network import processes as module
from manyheads.network.meeting import _assemble, _have_gpus_of_their_own, _join, _join_start, _open_store, join
from manyheads.network.processes import Processes


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that neither go on telling where they are nor take their leave."""
    monkeypatch.setattr(Processes, "_beat", lambda self: None)
    monkeypatch.setattr(module.atexit, "register", lambda leave: None)


def meet(store: HashStore, names: list[str]) -> list[str]:
    count = len(names)

    def come(rank: int) -> str:
        start = names[0] if rank == 0 else _join_start(store, names[rank], rank, count, 20)
        processes = Processes(PrefixStore(start, store), rank, count, start, 20, torch.device("cpu"))
        _assemble(processes, store)
        return start

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(come, reversed(range(count))))


@pytest.mark.usefixtures("quiet")
def test_a_start_has_a_name_that_no_earlier_one_had() -> None:
    """The store is as the last start left it, with what all of its processes have said."""
    store = HashStore()
    assert meet(store, ["a0", "a1", "a2"]) == ["a0"] * 3
    assert meet(store, ["b0", "b1", "b2"]) == ["b0"] * 3
    assert meet(store, ["c0", "c1"]) == ["c0"] * 2


@pytest.mark.usefixtures("quiet")
def test_whoever_does_not_come_is_named() -> None:
    store = HashStore()
    first = Processes(store, 0, 3, "start", 0.1, torch.device("cpu"))
    with pytest.raises(UserError, match=r"processes 1, 2 of 3 did not join within 0\.1 s"):
        _assemble(first, store)
    with pytest.raises(UserError, match=r"process 0 of 3 did not join within 0\.1 s"):
        _join_start(HashStore(), "own", 2, 3, 0.1)


# The store


def test_a_store_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"process 1 found no process 0 at 127\.0\.0\.1:9 within 0\.1 s"):
        _open_store("127.0.0.1", 9, 1, keeps=False, timeout=0.1)


def test_somebody_else_who_listens_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"process 1 found no process 0 at 127.0.0.1:{port} within 0.1 s"):
            _open_store("127.0.0.1", port, 1, keeps=False, timeout=0.1)
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}"):
            _open_store("127.0.0.1", port, 0, keeps=True, timeout=5)


def test_whoever_looks_for_the_store_finds_it() -> None:
    kept = _open_store("127.0.0.1", 0, 0, keeps=True, timeout=5)
    found = _open_store("127.0.0.1", kept.port, 1, keeps=False, timeout=5)
    found.set("word", "said")
    assert kept.get("word") == b"said"


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "two"},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "here"},
    ],
)
def test_an_environment_that_is_not_whole(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_joined", None)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WORLD_SIZE is set, but what goes with it is missing or wrong"):
        join(1, torch.device("cpu"))


# GPUs, which are only told of here


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu {device.index}"))


def connected_by_nccl(devices: list[str]) -> set[bool]:
    """What each of the processes with these devices finds."""
    store, count = HashStore(), len(devices)
    with ThreadPoolExecutor(count) as pool:
        asked = pool.map(
            lambda rank: _have_gpus_of_their_own(store, rank, count, torch.device(devices[rank])), range(count)
        )
        return {*asked}


@pytest.mark.usefixtures("gpus")
def test_nccl_connects_processes_that_have_a_gpu_each() -> None:
    assert connected_by_nccl(["cuda:0", "cuda:1"]) == {True}
    assert connected_by_nccl(["cuda:1", "cuda:1"]) == {False}, "NCCL refuses a GPU that is shared"
    assert connected_by_nccl(["cuda:0", "cpu"]) == {False}, "all of them go the same way"
    assert connected_by_nccl(["cpu", "cpu"]) == {False}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_the_processes_of_a_host_share_its_gpus_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    chosen = []
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        chosen.append(pick_device(name))
    assert chosen == [torch.device("cuda", index) for index in (0, 1, 0)]
    monkeypatch.delenv("WORLD_SIZE")
    assert pick_device(name) == torch.device("cuda", 0), "alone it takes the first"
    assert pick_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(("rank", "torchrun", "waits"), [("0", True, False), ("1", True, True), ("1", False, False)])
def test_before_they_meet_the_first_of_a_host_speaks(
    rank: str, torchrun: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others leave torchrun running until then; when it has not stopped them, they have something else to say."""
    waited: list[float] = []
    monkeypatch.setattr(meeting, "time", SimpleNamespace(sleep=waited.append))
    # This process may have met others, or found itself alone, in another test.
    monkeypatch.setattr(meeting, "_joined", None)
    monkeypatch.setattr(meeting, "_looking", False)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert meeting.failure("mine", interrupted=True) == ("mine" if rank == "0" else None)
    assert not waited, "after Ctrl-C nobody waits"
    assert meeting.failure("mine") == ("mine" if rank == "0" or torchrun else None)
    assert bool(waited) == waits


@pytest.mark.usefixtures("quiet")
def test_processes_connect_once_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come while they do is no longer looked for, but a way between two of them that is shut."""
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_joined", None)
    monkeypatch.setattr(meeting, "_looking", False)
    connecting: list[bool] = []

    def connect(*_: object, **__: object) -> None:
        assert meeting._joined is not None
        connecting.append(meeting._joined.connecting)

    monkeypatch.setattr(meeting.dist, "init_process_group", connect)
    monkeypatch.setattr(Processes, "wait", lambda _: None)
    _join(20, torch.device("cpu"))
    assert connecting == [True] and meeting._joined is not None and not meeting._joined.connecting
