"""How the processes of a run find each other: by what torchrun tells them, and a store that all of them reach."""

import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from manyheads.errors import Transient, UserError
from manyheads.machine import local_rank, started_together
from manyheads.network.processes import POLL_SECONDS, Processes, ask
from manyheads.units import numbered

_FIRST_SPEAKS_SECONDS = 10.0

_joined: Processes | None = None
_looking = False
"""Whether this process has begun to look for process 0."""


def join(timeout: float, device: torch.device) -> Processes:
    """Meet the processes that were started with this one; later calls give the same answer."""
    global _joined
    if _joined is None:
        if started_together():
            _join(timeout, device)
        else:
            _joined = Processes(None, 0, 1, secrets.token_hex(8), timeout, device)
    assert _joined is not None
    return _joined


def failure(line: str, *, interrupted: bool = False) -> str | None:
    """What to show when this process fails with a ``line``; None: another process on this machine shows it.

    Before the processes have met, the first on each host shows its own line; if that would be a process 0 that never
    came, process 1 does. ``interrupted``: all are, and nobody waits for another.
    """
    if _joined is not None:
        return _joined.failure(line)
    if local_rank() == 0 or (_looking and os.environ["RANK"] == "1"):
        return line
    if interrupted or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # torchrun stops all processes when one has failed. So the first, which may be slower, is given the time to show its
    # line, and this process is stopped then. If it is not, the first has not failed, or is slower still.
    time.sleep(_FIRST_SPEAKS_SECONDS)
    return line


def _join(timeout: float, device: torch.device) -> None:
    global _joined, _looking
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not 0 <= rank < count:
            raise ValueError(f"RANK is {rank}")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"WORLD_SIZE is set, but what goes with it is missing or wrong ({error}): start with torchrun."
        ) from None
    _looking = True
    # torchrun keeps the store itself, which then outlives the processes; without torchrun, process 0 keeps it.
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store, own = _open_store(address, port, rank, keeps, timeout), secrets.token_hex(8)
    try:
        start = own if rank == 0 else _join_start(store, own, rank, count, timeout)
    except dist.DistError as error:
        raise _nobody_at(address, port, rank, timeout) from error
    ours = PrefixStore(start, store)
    # From here on the store decides whose error is shown.
    _joined = Processes(ours, rank, count, start, timeout, torch.device("cpu"), keeps)
    with _joined.together():
        _assemble(_joined, store)
        _joined.connecting = True
        nccl = _have_gpus_of_their_own(ours, rank, count, device)
        # With blocking waits NCCL reports a time-out as gloo does, instead of ending the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=ours, rank=rank, world_size=count, timeout=limit)
        if nccl:
            _joined.wire = device
            # NCCL connects in its first call, which all must make together; in a round some may have nothing to send.
            torch.cuda.set_device(device)
            dist.all_reduce(torch.zeros(1, device=device))
    # A process that ends soon, with an error in its options perhaps, must not end while others still connect.
    _joined.wait()
    _joined.connecting = False


def _open_store(address: str, port: int, rank: int, keeps: bool, timeout: float) -> TCPStore:
    """The store of all processes, which one of them keeps, or torchrun."""
    began = time.monotonic()
    if not keeps:
        # torch reports a store that is not there yet in a hundred lines: see that it listens before asking it.
        while not _listens(address, port):
            if time.monotonic() - began > timeout:
                raise _nobody_at(address, port, rank, timeout)
            time.sleep(POLL_SECONDS)
    limit = timedelta(seconds=timeout)
    # With a limit: something else may listen there and never answer.
    store = ask(
        lambda: TCPStore(address, port, None, keeps, limit, wait_for_workers=False, multi_tenant=True),
        began + timeout - time.monotonic(),
    )
    if store is None and keeps:
        raise Transient(f"process 0 cannot listen on port {port}: check that it is free, or give another MASTER_PORT.")
    if store is None:
        raise _nobody_at(address, port, rank, timeout)
    return store


def _listens(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def _nobody_at(address: str, port: int, rank: int, timeout: float) -> UserError:
    return Transient(
        f"process {rank} found no process 0 at {address}:{port} within {timeout:g} s: check that it was started, and"
        " that the hosts can reach each other."
    )


def _have_gpus_of_their_own(store: Store, rank: int, count: int, device: torch.device) -> bool:
    """Whether NCCL can connect the processes: it needs a GPU for each. Otherwise gloo sends through host memory."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu/{rank}", own)
    gpus = [store.get(f"gpu/{other}") for other in range(count)]
    return b"" not in gpus and len({*gpus}) == count


def _join_start(store: Store, own: str, rank: int, count: int, timeout: float) -> str:
    """A name for this start, the same for all its processes.

    torchrun restarts processes with the store as the last ones left it, including the addresses of the dead: what this
    start keeps in the store needs a name of its own. Process 0 proposes one; each of the others answers under it with a
    token of its ``own``, and has joined once process 0 has confirmed that token.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check(["start"]):
            start = store.get("start").decode()
            store.set(f"{start}/{rank}", own)
            if store.check([f"{start}/{rank}/{own}"]):
                return start
        time.sleep(POLL_SECONDS)
    raise _not_there([0], count, timeout)


def _assemble(processes: Processes, store: Store) -> None:
    """Return when all have come; until then process 0 proposes its name, and confirms those who answer."""
    deadline = time.monotonic() + processes.timeout
    start, unmet = processes.generation, [*range(1, processes.count)]
    while absent := processes.absent():
        if processes.rank == 0:
            store.set("start", start)
            for rank in [rank for rank in unmet if store.check([f"{start}/{rank}"])]:
                store.set(f"{start}/{rank}/{store.get(f'{start}/{rank}').decode()}", "")
                unmet.remove(rank)
        if time.monotonic() > deadline:
            raise _not_there(absent, processes.count, processes.timeout)
        time.sleep(POLL_SECONDS)


def _not_there(ranks: list[int], count: int, timeout: float) -> UserError:
    return Transient(
        f"{numbered('process', ranks)} of {count} did not join within {timeout:g} s: check that all were started and"
        " are still running."
    )
