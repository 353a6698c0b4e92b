"""Addresses of this machine, by what the system says of its own interfaces."""

import socket
from pathlib import Path

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


def test_an_interface_is_found_by_its_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gloo would otherwise listen where the machine's name leads, and sites that meet at such an address never meet."""
    told = tmp_path / "if_inet6"
    told.write_text(
        "fd780000000000000000000000000002 02 40 00 80     eth0\n00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(addresses, "_IPV6_ADDRESSES", told)
    assert addresses.interface_of("fd78::2") == addresses.interface_of("fd78::2%eth0") == "eth0"
    assert addresses.interface_of("fd78::3") is None
    told.unlink()
    assert addresses.interface_of("fd78::2") is None


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
