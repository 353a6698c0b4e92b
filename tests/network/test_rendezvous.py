"""Machines that do not meet: one line and status 1, whatever keeps them from it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nobody listens yet."""
    # It is set by the meeting: put it back afterwards.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def meet(endpoint: str, **config: object) -> RendezvousHandler:
    asked = {"last_call_timeout": 1, "join_timeout": 2, "read_timeout": 2, **config}
    return get_rendezvous_handler(RendezvousParameters("manyheads", endpoint, "mine", 2, 3, **asked))


def test_a_machine_that_never_comes(endpoint: str) -> None:
    meeting = meet(endpoint, is_host=True)
    assert not meeting.use_agent_store, "each start has a store of its own: the machine of process 0 may go"
    with pytest.raises(SystemExit, match=f"^manyheads: fewer than 2 machines came to {endpoint} in time: start .*$"):
        meeting.next_rendezvous()
    assert meeting.shutdown()


def test_nobody_where_they_meet(endpoint: str) -> None:
    with pytest.raises(SystemExit, match=f"^manyheads: no answer from {endpoint}, where the machines meet: .*$"):
        meet(endpoint, is_host=False)


def test_a_meeting_that_has_ended(endpoint: str) -> None:
    meeting = meet(endpoint, is_host=True)
    meeting.set_closed()
    assert meeting.is_closed()
    with pytest.raises(SystemExit, match=r"^manyheads: the machines that met as 'mine' have ended: start .*$"):
        meeting.next_rendezvous()


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
