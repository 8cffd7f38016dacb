"""FrontEndObserver. Owns: what the HTTP layer tells a listener, so that telemetry can count without being known."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from engine.errors import RefusalCause


class CutCause(StrEnum):
    """Why the server ended a connection, or refused it, before its client did."""

    TOO_MANY = "too_many"
    IDLE = "idle"
    HEAD_LATE = "head_late"
    HEAD_TOO_LARGE = "head_too_large"
    BODY_LATE = "body_late"
    NO_HTTP = "no_http"
    NOT_TAKEN = "not_taken"


class FrontEndObserver(Protocol):
    """Called on the event loop; must be quick and must not raise. One `on_received` per generation request."""

    def on_received(self) -> None:
        """A completion or chat request arrived, before anything about it was checked."""
        ...

    def on_rejected(self, cause: RefusalCause) -> None:
        """It was turned away: received = rejected + accepted."""
        ...

    def on_disconnect(self) -> None:
        """The client went away before its response ended."""
        ...

    def on_stream_send(self, ns: int) -> None:
        """One write of a stream took `ns` nanoseconds."""
        ...

    def on_first_byte(self, rid: str, t_ns: int) -> None:
        """The first token of a streamed request was written at `t_ns` on the engine's clock. Once per request."""
        ...

    def on_cut(self, cause: CutCause) -> None:
        """A connection was refused or ended by this server."""
        ...


class NullObserver:
    """Listens to nothing."""

    def on_received(self) -> None: ...

    def on_rejected(self, cause: RefusalCause) -> None: ...

    def on_disconnect(self) -> None: ...

    def on_stream_send(self, ns: int) -> None: ...

    def on_first_byte(self, rid: str, t_ns: int) -> None: ...

    def on_cut(self, cause: CutCause) -> None: ...
