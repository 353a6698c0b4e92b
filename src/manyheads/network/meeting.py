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

from manyheads.errors import UserError
from manyheads.network.processes import POLL_SECONDS, Processes, ask

_joined: Processes | None = None


def started_together() -> bool:
    """Whether torchrun, or whoever sets the same environment, has started this process beside others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def local_rank() -> int:
    """The rank among the processes on this host."""
    given = os.environ.get("LOCAL_RANK", "0") if started_together() else "0"
    return int(given) if given.isdecimal() else 0


def join(timeout: float, device: torch.device) -> Processes:
    """Meet the processes that were started with this one; later calls give the same answer."""
    global _joined
    if _joined is None:
        own = secrets.token_hex(8)
        _joined = _join(own, timeout, device) if started_together() else Processes(None, 0, 1, own, timeout, device)
    return _joined


def first_to_fail() -> bool:
    """Whether this process's error is the one to show. Before the processes have met, each host shows its own."""
    if _joined is None:
        return local_rank() == 0
    return _joined.first_to_fail()


def _join(own: str, timeout: float, device: torch.device) -> Processes:
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not 0 <= rank < count:
            raise ValueError(f"RANK is {rank}")
    except (KeyError, ValueError) as error:
        raise UserError(f"WORLD_SIZE is set, but not what belongs to it ({error}): start with torchrun.") from None
    # torchrun keeps the store itself, and it then outlives the processes; without torchrun process 0 keeps it.
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = _open_store(address, port, rank, keeps, timeout)
    try:
        generation = _meet(store, own, rank, range(1, count), timeout)
        store = PrefixStore(generation, store)
        nccl = _have_gpus_of_their_own(store, rank, count, device)
        wire = device if nccl else torch.device("cpu")
        processes = Processes(store, rank, count, generation, timeout, wire, keeps)
        with processes.together():
            # With blocking waits NCCL reports a time-out as gloo does, instead of ending the process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
            if nccl:
                # NCCL connects in the first call, which all must make; in a round some may have nothing to send.
                torch.cuda.set_device(device)
                dist.all_reduce(torch.zeros(1, device=device))
        # Whoever ends soon, because of an error in the options perhaps, must not end while others still connect.
        processes.wait()
    except dist.DistError as error:
        raise _nobody_at(address, port, rank, timeout) from error
    return processes


def _open_store(address: str, port: int, rank: int, keeps: bool, timeout: float) -> TCPStore:
    """The store of all processes, which one of them keeps, or torchrun."""
    began = time.monotonic()
    if not keeps:
        # torch reports a store that is not there yet in a hundred lines: look whether it is before asking it.
        while not _listens(address, port):
            if time.monotonic() - began > timeout:
                raise _nobody_at(address, port, rank, timeout)
            time.sleep(POLL_SECONDS)
    limit = timedelta(seconds=timeout)
    # Whatever else listens there may never answer.
    store = ask(
        lambda: TCPStore(address, port, None, keeps, limit, wait_for_workers=False, multi_tenant=True),
        began + timeout - time.monotonic(),
    )
    if store is None and keeps:
        raise UserError(f"process 0 cannot listen on port {port}: see whether it is free, or give another MASTER_PORT.")
    if store is None:
        raise _nobody_at(address, port, rank, timeout)
    return store


def _listens(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def _nobody_at(address: str, port: int, rank: int, timeout: float) -> UserError:
    return UserError(
        f"process {rank} found no process 0 at {address}:{port} within {timeout:g} s: see whether it was started, and"
        " whether the hosts reach each other."
    )


def _have_gpus_of_their_own(store: Store, rank: int, count: int, device: torch.device) -> bool:
    """Whether NCCL can connect the processes: it wants a GPU for each. Others send through the host's memory."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu/{rank}", own)
    gpus = [store.get(f"gpu/{other}") for other in range(count)]
    return b"" not in gpus and len({*gpus}) == count


def _meet(store: Store, own: str, rank: int, others: range, timeout: float) -> str:
    """A name for this start, the same for all its processes; ``own`` is a random one.

    torchrun starts processes anew with the store as the last ones left it, the addresses of the dead included: what
    this start keeps in the store must have a name of its own. Process 0 proposes one; each of the others takes it up
    under a name of its own, and is in when it sees that confirmed.
    """
    deadline = time.monotonic() + timeout
    missing = list(others)
    while True:
        if rank == 0:
            store.set("start", own)
            for other in missing.copy():
                if store.check([f"{own}/{other}"]):
                    store.set(f"{own}/{other}/{store.get(f'{own}/{other}').decode()}", "")
                    missing.remove(other)
            if not missing:
                return own
        elif store.check(["start"]):
            start = store.get("start").decode()
            store.set(f"{start}/{rank}", own)
            if store.check([f"{start}/{rank}/{own}"]):
                return start
        if time.monotonic() > deadline:
            absent = f"process {', '.join(map(str, missing))}" if rank == 0 else "process 0"
            raise UserError(f"{absent} did not join within {timeout:g} s: start as many processes as WORLD_SIZE says.")
        time.sleep(POLL_SECONDS)
