"""Addresses of this machine, by what the system says of its own interfaces."""

import socket

import pytest

from manyheads.network import addresses


def test_what_is_on_this_machine_alone() -> None:
    for host in ("localhost", "127.0.0.1", "127.0.1.1"):
        assert addresses.is_here(host)
        assert addresses.towards(host) is None
    assert addresses.interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_what_is_elsewhere(host: str) -> None:
    """An address for documentation, which no machine has, and a name that nobody has."""
    assert not addresses.is_here(host)
    assert addresses.interface_of(host) is None


def test_the_way_to_another_machine_begins_at_an_interface_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Way:
        """A socket on a machine that reaches others by an address of its own."""

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> "Way":
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, address: tuple[str, int]) -> None:
            assert address[0] == "192.0.2.1"

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.2", 5

    monkeypatch.setattr(socket, "socket", Way)
    assert addresses.towards("192.0.2.1") == "10.0.0.2"
