"""The end of the line. Owns: a webhook that Alertmanager posts to, and what arrived there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

_MAX_BODY: Final = 4 * 1024 * 1024


class Notice(NamedTuple):
    """One alert of one notification. `route`: the receiver's name, `page` or `ticket`; `status`: firing or resolved."""

    route: str
    status: str
    name: str
    instance: str
    summary: str


class Receiver:
    """Listens on a loopback port while entered. `told` is called with each notice, on a thread of the receiver."""

    def __init__(self, port: int = 0, *, told: Callable[[Notice], None] = lambda _: None) -> None:
        self.notices: list[Notice] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if length > _MAX_BODY:
                    self.send_error(413)
                    return
                try:
                    notices = _notices(self.path.strip("/"), json.loads(self.rfile.read(length)))
                except (ValueError, KeyError, TypeError, AttributeError):
                    self.send_error(400)
                    return
                for notice in notices:
                    receiver.notices.append(notice)
                    told(notice)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                """Says nothing: notices are the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _notices(route: str, body: dict[str, Any]) -> list[Notice]:
    """What Alertmanager's webhook says. Raises one of several errors for what is none."""
    return [
        Notice(
            route,
            alert["status"],
            alert["labels"]["alertname"],
            alert["labels"].get("instance", ""),
            alert["annotations"].get("summary", ""),
        )
        for alert in body["alerts"]
    ]
