"""Which of this machine's addresses lead to the others: its name may lead nowhere but to itself."""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""Linux's number for: the IPv4 address of an interface."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def is_here(host: str) -> bool:
    """Whether a name or address is one of this machine's."""
    for family, kind, _, _, (address, *_) in _resolved(host):
        with suppress(OSError), socket.socket(family, kind) as test:
            test.bind((address, 0))
            return True
    return False


def towards(host: str) -> str | None:
    """This machine's own address on the way to a host; None where it is on this machine alone, or unknown."""
    for family, kind, _, _, (address, *_) in _resolved(host):
        # Nothing is sent: the system only looks up the way.
        with suppress(OSError), socket.socket(family, kind) as test:
            test.connect((address, 1))
            own = test.getsockname()[0]
            return None if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None: none is known."""
    if ":" in address:
        return _ipv6_interfaces().get(ipaddress.ip_address(address.partition("%")[0]).packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _ipv6_interfaces() -> dict[str, str]:
    """Every IPv6 address of this machine, in 32 hexadecimal digits, and its interface, where Linux tells them."""
    with suppress(OSError):
        lines = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
        return {digits: name for digits, _, _, _, _, name in lines}
    return {}


def _resolved(host: str) -> list[tuple]:
    with suppress(OSError):
        return socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return []
