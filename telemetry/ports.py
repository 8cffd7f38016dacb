"""Sockets. Owns: taking a port, or saying that it is taken and what to do; room for the connections to come."""

from __future__ import annotations

import errno
import resource
import socket
from typing import Final

from engine.errors import ConfigError

#: Files that a server needs beside its connections: journal, model, listener, event loop, threads of libraries.
_OTHER_FILES: Final = 192


class PortTaken(ConfigError):
    """Somebody listens there already."""


def bind_listener(host: str, port: int, *, pick: bool = False) -> socket.socket:
    """A bound socket on `host`; `port` 0 is a free one. The caller closes it.

    pick  take a free port instead when `port` is taken
    Raises PortTaken, or ConfigError when the address is not this machine's or may not be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host={host!r}: {error.strerror}") from error
    except UnicodeError as error:  # an empty or too long part of the name
        raise ConfigError(f"server.host={host[:80]!r} is no host name: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the last connection's minute in TIME_WAIT; a live listener still refuses us.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening at once is what makes a second process see the port as taken.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        if not pick:
            raise PortTaken(f"port {port} on {host} is taken: stop who holds it, or choose another") from error
        return bind_listener(host, 0)
    return listener


def port_of(listener: socket.socket) -> int:
    """The port that `listener` is bound to."""
    return int(listener.getsockname()[1])


def free_port(host: str, wanted: int, *, avoid: frozenset[int] = frozenset()) -> int:
    """A port for a process that binds by itself: `wanted` when it is free, else any other. Never one of `avoid`.

    Between this answer and the bind another process may take it; the child then fails and says so.
    """
    if wanted and wanted not in avoid:
        with bind_listener(host, wanted, pick=True) as listener:
            return port_of(listener)
    while True:
        with bind_listener(host, 0) as listener:
            if port_of(listener) not in avoid:
                return port_of(listener)


def make_room_for_files(connections: int) -> None:
    """Let this process open that many connections beside its files. Raises ConfigError when it may not.

    Without room a server stops accepting, and then cannot write its journal either.
    """
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"server.max_connections={connections} needs {wanted} open files; this process may open {hard} "
            "(`ulimit -Hn`)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
