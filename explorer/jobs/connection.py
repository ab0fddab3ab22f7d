"""Which user of this machine has the other end of a connection. Only the user who started the app may run more code.

A page on the loopback answers every user of the machine: the address alone does not tell them apart.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from explorer.errors import BadInput

FIRST_PORT, N_PORTS = 8501, 100
Address = tuple[str, int | None] | None
"""Host and port of an end of a connection, as ASGI has them."""
SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
"""Linux lists every connection there with the user that has it."""


def free_port() -> int:
    """The first port of the loopback from 8501 on that no program listens at. Raises BadInput if there is none."""
    for port in range(FIRST_PORT, FIRST_PORT + N_PORTS):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise BadInput(f"No port from {FIRST_PORT} to {FIRST_PORT + N_PORTS - 1} is free.", hint="Name one with --port.")


def is_same_user(client: Address, server: Address) -> bool:
    """Whether a connection comes from this machine, and on Linux from a process of the user who runs this one."""
    if client is None or server is None or client[1] is None or server[1] is None:
        return False
    address = ip_address(client[0])
    if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
        return False
    users = users_of_connection(client[1], server[1])
    return users is None or (bool(users) and users <= {0, os.geteuid()})


def users_of_connection(client_port: int, server_port: int) -> set[int] | None:
    """Users with a socket that is connected from `client_port` to `server_port`; None where the system has no list."""
    ports, users, is_listed = (client_port, server_port), set(), False
    for path in SOCKETS:
        with suppress(OSError):
            lines = Path(path).read_text().splitlines()[1:]
            is_listed = True
            for fields in map(str.split, lines):
                if tuple(int(place.rpartition(":")[2], 16) for place in fields[1:3]) == ports:
                    users.add(int(fields[7]))
    return users if is_listed else None
