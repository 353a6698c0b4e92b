"""``torchrun --rdzv-backend manyheads``: like c10d, but one line says why machines cannot meet.

After a user's mistake it also ends torchrun instead of restarting, and it lets nobody who reaches the port run code
here. torchrun finds it by the package's entry point and runs it before anything else of manyheads.
"""

import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from manyheads.network.addresses import interface_of, is_here, towards
from manyheads.network.restarts import announce, met

_LINGER_SECONDS = 2.0
"""How long the machine where all meet still answers after the end."""

_IN_A_STATE = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("builtins", "set"),
}
"""All that the state of a meeting is made of."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun asks the entry point for."""
    return _meet


def _meet(params: RendezvousParameters) -> RendezvousHandler:
    # Else torchrun (as of 2.13) can neither go on without the machine of process 0 nor take in one that comes later.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _take_address(params)
    with _one_line(params):
        backend, store = _backend(params)
        return _Meeting(create_handler(store, _Checked(backend), params), params)


def _take_address(params: RendezvousParameters) -> None:
    """Be known to the others by the address that leads to where they meet, unless the user names another.

    torch takes the machine's name, which often leads to that machine alone.
    """
    own = towards(_host(params))
    params.local_addr = params.local_addr or own
    if own and (interface := interface_of(own)):
        # gloo too would listen where the machine's name leads; the processes inherit this.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _host(params: RendezvousParameters) -> str:
    return parse_rendezvous_endpoint(params.endpoint, default_port=0)[0]


def _backend(params: RendezvousParameters) -> tuple[RendezvousBackend, Store]:
    """torch's own, with a limit: something else may listen there and never answer."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    from manyheads.network.processes import ask

    def make() -> tuple[RendezvousBackend, Store] | Exception:
        try:
            if params.get("is_host") is not None:
                return create_backend(params)
            # torch would ask whether the machine's name leads to the endpoint.
            if is_here(_host(params)):
                params.config["is_host"] = "true"
                with suppress(RendezvousConnectionError):
                    return create_backend(params)
            # They meet elsewhere, or at another torchrun of this machine that was started before.
            params.config["is_host"] = "false"
            return create_backend(params)
        except Exception as error:
            # Raised below: here it would only be printed, by a thread that nobody waits for any more.
            return error

    # As long as torch itself tries at most: to connect, and to read.
    made = ask(make, 2 * (params.get_as_int("read_timeout", 60) or 60) + _LINGER_SECONDS)
    if made is None:
        raise RendezvousConnectionError
    if isinstance(made, Exception):
        raise made
    return made


class _Checked(RendezvousBackend):
    """torch's own backend, whose states are looked through before torch unpickles them.

    Whoever reaches the port can write one, and a pickle can call any function.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        if found is not None:
            _look_through(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(state, token)
        if found is not None:
            _look_through(found[0])
        return found


def _look_through(state: bytes) -> None:
    """Refuse a pickle that names anything else than the state of a meeting is made of."""
    try:
        _State(io.BytesIO(state)).load()
    except Exception as error:
        # A damaged pickle fails in many ways.
        raise RendezvousStateError(f"not the state of a meeting: {error}") from None


class _State(pickle.Unpickler):
    """Reads nothing but the state of a meeting."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _IN_A_STATE:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Meeting(RendezvousHandler):
    """torchrun's own handler, which ends with one line when machines cannot meet, and after a user's mistake."""

    def __init__(self, handler: RendezvousHandler, params: RendezvousParameters) -> None:
        self._handler, self._params, self._gave_up = handler, params, announce()
        self._over = False

    def get_backend(self) -> str:
        return self._params.backend

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        if self._gave_up.exists():
            # A process of this machine has said why.
            self.shutdown()
            raise SystemExit(2)
        with _one_line(self._params):
            found = self._handler.next_rendezvous()
        met()
        return found

    def is_closed(self) -> bool:
        with _one_line(self._params):
            return self._handler.is_closed()

    def set_closed(self) -> None:
        with _one_line(self._params):
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        with _one_line(self._params):
            return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """End the meeting, for all."""
        if self._over:
            return True
        self._over = True
        self._gave_up.unlink(missing_ok=True)
        closed = self._handler.shutdown()
        if self._params.get_as_bool("is_host"):
            # The others must still be able to ask whether it is over, and to end it: else torch prints a stack trace.
            time.sleep(_LINGER_SECONDS)
        return closed


@contextmanager
def _one_line(params: RendezvousParameters) -> Iterator[None]:
    """What keeps machines from meeting ends torchrun with status 1 and one line."""
    try:
        yield
    except RendezvousTimeoutError:
        raise SystemExit(
            f"manyheads: fewer than {params.min_nodes} machines came to {params.endpoint} in time: start the same "
            "command on the others, or give them longer with --rdzv-conf join_timeout=SECONDS."
        ) from None
    except RendezvousConnectionError:
        raise SystemExit(
            f"manyheads: no answer from {params.endpoint}, where the machines meet: check that torchrun is running"
            " there, as it is until the run ends, and that its port is open, and start again."
        ) from None
    except RendezvousStateError:
        raise SystemExit(
            f"manyheads: {params.endpoint} holds something else than where the machines meet: see who else reaches that"
            " port, and start again with another."
        ) from None
    except RendezvousClosedError:
        raise SystemExit(
            f"manyheads: the machines that met as {params.run_id!r} have ended: start all of them again."
        ) from None
