"""Machines that do not meet: one line and status 1, whatever keeps them from it. Mistakes are not repeated."""

import base64
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from manyheads.network import rendezvous
from manyheads.network.restarts import give_up, restarted


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where nobody listens yet."""
    # They are set by the meeting: put them back afterwards.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    monkeypatch.setenv("MANYHEADS_GAVE_UP", "")
    monkeypatch.setenv("MANYHEADS_MEETINGS", "0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 0.1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def meet(endpoint: str, *, machines: int = 2, **config: object) -> RendezvousHandler:
    asked = {"last_call_timeout": 1, "join_timeout": 2, "read_timeout": 2, **config}
    return get_rendezvous_handler(RendezvousParameters("manyheads", endpoint, "mine", machines, 3, **asked))


def test_a_machine_that_never_comes(endpoint: str) -> None:
    meeting = meet(endpoint, is_host=True)
    assert not meeting.use_agent_store, "each start has a store of its own: the machine of process 0 may go"
    with pytest.raises(SystemExit, match=f"^manyheads: fewer than 2 machines came to {endpoint} in time: start .*$"):
        meeting.next_rendezvous()
    assert meeting.shutdown()


def test_the_first_on_the_machine_where_they_meet_keeps_the_place_and_the_next_finds_it(endpoint: str) -> None:
    first, second = meet(endpoint), meet(endpoint)
    first.set_closed()
    assert second.is_closed()
    assert first.shutdown() and second.shutdown()


def test_where_they_meet_somebody_answers_until_all_have_ended(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Said outright: in one process torch would take both for the host.
    first, second = meet(endpoint, is_host=True), meet(endpoint, is_host=False)
    waited: list[float] = []
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(sleep=waited.append))
    assert second.shutdown()
    assert waited == []
    assert first.shutdown()
    assert len(waited) == 1
    assert first.shutdown(), "torchrun may ask again"
    assert len(waited) == 1


@pytest.mark.parametrize("given", [None, "10.9.9.9"])
def test_a_machine_is_known_by_the_address_that_leads_to_the_others(
    endpoint: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first, so that it is put back afterwards as it was.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous, "towards", {"localhost": "10.0.0.2"}.get)
    monkeypatch.setattr(rendezvous, "interface_of", {"10.0.0.2": "wg0"}.get)
    params = RendezvousParameters("manyheads", endpoint, "mine", 1, 1, local_addr=given, read_timeout=2)
    meeting = get_rendezvous_handler(params)
    assert params.local_addr == (given or "10.0.0.2")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "wg0"
    assert meeting.shutdown()


def test_nobody_where_they_meet(endpoint: str) -> None:
    with pytest.raises(SystemExit, match=f"^manyheads: no answer from {endpoint}, where the machines meet: .*$"):
        meet(endpoint, is_host=False)


def test_something_else_listens_where_they_meet(endpoint: str) -> None:
    host, port = endpoint.split(":")
    with socket.create_server((host, int(port))), pytest.raises(SystemExit, match=r"^manyheads: no answer from "):
        meet(endpoint, is_host=False, read_timeout=1)


def test_a_meeting_that_has_ended(endpoint: str) -> None:
    meeting = meet(endpoint, is_host=True)
    meeting.set_closed()
    assert meeting.is_closed()
    with pytest.raises(SystemExit, match=r"^manyheads: the machines that met as 'mine' have ended: start .*$"):
        meeting.next_rendezvous()


def test_whoever_meets_again_was_not_away(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    meeting = meet(endpoint, is_host=True, machines=1, join_timeout=60)
    meeting.next_rendezvous()
    assert not restarted()
    meeting.next_rendezvous()
    assert restarted()
    assert meeting.shutdown()


class Calls:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("damaged", [False, True])
def test_nobody_who_reaches_the_port_runs_code_here(endpoint: str, tmp_path: Path, damaged: bool) -> None:
    meeting = meet(endpoint, is_host=True)
    host, port = endpoint.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    state = pickle.dumps(Calls(tmp_path / "called"))
    store.set("torch.rendezvous.mine", base64.b64encode(state[:-9] if damaged else state).decode())
    with pytest.raises(SystemExit, match=f"^manyheads: {endpoint} holds something else than where the machines meet: "):
        meeting.next_rendezvous()
    assert not (tmp_path / "called").exists()


def test_nobody_meets_again_after_a_mistake(endpoint: str, tmp_path: Path) -> None:
    meeting = meet(endpoint, is_host=True)
    give_up()
    with pytest.raises(SystemExit) as ended:
        meeting.next_rendezvous()
    assert ended.value.code == 2
    assert meeting.is_closed(), "for the others, too"
    assert meeting.shutdown(), "as torchrun does"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_torchrun_does_not_repeat_a_mistake(endpoint: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.full((20, 4), np.nan), y=np.arange(20) % 2)
    options = ("--max-restarts", "3", "--rdzv-backend", "manyheads", "--rdzv-endpoint", endpoint)
    program = ("-m", "manyheads", "train", "deprl", "--workers", "2", "--data", str(tmp_path / "mine.npz"))
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith(("W", "E"))]
    assert line.startswith("manyheads: ") and "mine.npz" in line


@pytest.mark.slow
def test_torchrun_says_it_in_one_line(endpoint: str, tmp_path: Path) -> None:
    options = ("--nnodes", "2", "--rdzv-backend", "manyheads", "--rdzv-endpoint", endpoint)
    program = ("-m", "manyheads", "train", "deprl", "--out", str(tmp_path / "run"))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-conf", "join_timeout=2", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"manyheads: fewer than 2 machines came to {endpoint} in time: start the same command on the others, or give "
        "them longer with --rdzv-conf join_timeout=SECONDS."
    ]
    assert not (tmp_path / "run").exists()
