"""Sources of observations. Owns: the `Source` protocol and `LiveSource`, the typed door to a running engine.

Dashboards, `top` and scripts read an engine only through this. Every failure to get an answer is a `SourceUnavailable`
that says when the engine was last reached; a refused question is `BadQuestion`; an unknown request is None.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Literal, Protocol, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from engine.errors import ConfigError
from telemetry.observe import (
    OBSERVE_VERSION,
    EngineStatus,
    EvidenceAnswer,
    EvidenceDetail,
    Explanation,
    Head,
    LanesAnswer,
    LatencyAnswer,
    LatencyBreakdown,
    LawsAnswer,
    ObserveError,
    PageFact,
    PageMap,
    PassesAnswer,
    PoolAnswer,
    QueueAnswer,
    RequestDetail,
    RequestsAnswer,
    TreeAnswer,
)
from telemetry.words import ENGLISH, Lang

_A = TypeVar("_A", bound=Head)
_MAX_PORT: Final = 65_535
Kind = Literal["unreachable", "key", "foreign", "version", "failed"]


class SourceError(Exception):
    """Root of what a source raises."""


class SourceUnavailable(SourceError):
    """No usable answer came: not reachable, too slow, an error of the server, not authorised, or another protocol.

    last_contact_wall_s  Unix time of the last good answer; None when there was none
    kind                 what a person can do about it: "unreachable" (start it), "key" (give the right one), "foreign"
                         (something else listens there), "version" (bring both to one version), "failed" (see its log)
    """

    def __init__(self, message: str, *, last_contact_wall_s: float | None, kind: Kind = "unreachable") -> None:
        super().__init__(message)
        self.last_contact_wall_s = last_contact_wall_s
        self.kind: Kind = kind


class BadQuestion(SourceError):
    """The engine refused the question itself (a bound was exceeded); asking again will not help."""

    def __init__(self, error: ObserveError) -> None:
        super().__init__(error.error)
        self.detail = error


class Source(Protocol):
    """Where observations come from: a live engine, or a recorded one."""

    def status(self) -> EngineStatus: ...

    def queue(self, limit: int = 500) -> QueueAnswer: ...

    def passes(self, n: int = 32) -> PassesAnswer: ...

    def latency(self) -> LatencyAnswer: ...

    def breakdown(self) -> LatencyBreakdown | None: ...

    def lanes(self, n: int = 40) -> LanesAnswer | None: ...

    def requests(self, limit: int = 500) -> RequestsAnswer: ...

    def request(self, rid: str) -> RequestDetail | None: ...

    def pages(self) -> PageMap: ...

    def page(self, page: int) -> PageFact | None: ...

    def pool(self) -> PoolAnswer | None: ...

    def tree(self, *, node: int | None = None, opened: Sequence[int] = (), top: int = 20) -> TreeAnswer | None: ...

    def laws(self) -> LawsAnswer | None: ...

    def evidence(self) -> EvidenceAnswer | None: ...

    def bundle(self, name: str) -> EvidenceDetail | None: ...

    def explain(self, rid: str, lang: Lang = ENGLISH) -> Explanation | None: ...


class LiveSource:
    """A running engine, by its URL as `engine_url` reads it. Safe to share between threads.

    Raises ConfigError for what is no such URL.

    timeout_s  for one answer, connect included; dashboards want a short one
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 2.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        refuse_odd(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = engine_url(url)
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )
        self._lock = threading.Lock()
        self._last_contact: float | None = None

    @property
    def last_contact_wall_s(self) -> float | None:
        """Unix time of the last good answer."""
        return self._last_contact

    def status(self) -> EngineStatus:
        return self._must("/observe/status", EngineStatus)

    def queue(self, limit: int = 500) -> QueueAnswer:
        """The waiting queue, at most `limit` entries from its head (1 to 5,000)."""
        return self._must("/observe/queue", QueueAnswer, {"limit": limit})

    def passes(self, n: int = 32) -> PassesAnswer:
        """The last `n` steps (1 to 512)."""
        return self._must("/observe/passes", PassesAnswer, {"n": n})

    def latency(self) -> LatencyAnswer:
        return self._must("/observe/latency", LatencyAnswer)

    def breakdown(self) -> LatencyBreakdown | None:
        """Where the time of first tokens and of gaps went; None from an older engine, which does not say."""
        return self._ask("/observe/breakdown", LatencyBreakdown)

    def lanes(self, n: int = 40) -> LanesAnswer | None:
        """The latest `n` arrivals as lanes of spans (1 to 200); None from an older engine, which does not say."""
        return self._ask("/observe/lanes", LanesAnswer, {"n": n})

    def requests(self, limit: int = 500) -> RequestsAnswer:
        """Live requests and the latest finished ones, at most `limit` of each (1 to 5,000)."""
        return self._must("/observe/requests", RequestsAnswer, {"limit": limit})

    def request(self, rid: str) -> RequestDetail | None:
        """One request; None when the engine does not know it (any more)."""
        return self._ask(f"/observe/requests/{quote(rid, safe='')}", RequestDetail)

    def pages(self) -> PageMap:
        return self._must("/observe/pages", PageMap)

    def page(self, page: int) -> PageFact | None:
        """One page; None when the pool has none of this number, and from an older engine."""
        return self._ask(f"/observe/pages/{page}", PageFact)

    def pool(self) -> PoolAnswer | None:
        """Memory over time; None from an older engine, as of what follows."""
        return self._ask("/observe/pool", PoolAnswer)

    def tree(self, *, node: int | None = None, opened: Sequence[int] = (), top: int = 20) -> TreeAnswer | None:
        """The `top` largest children (1 to 200) of the root and of each of `opened` (at most 64); `node` in full."""
        asked: dict[str, int | str] = {"top": top}
        if node is not None:
            asked["node"] = node
        if opened:
            asked["open"] = ",".join(map(str, opened))
        return self._ask("/observe/tree", TreeAnswer, asked)

    def laws(self) -> LawsAnswer | None:
        """Every law of the engine's checker, and what checking costs."""
        return self._ask("/observe/laws", LawsAnswer)

    def evidence(self) -> EvidenceAnswer | None:
        """Evidence bundles beside the engine's journal."""
        return self._ask("/observe/evidence", EvidenceAnswer)

    def bundle(self, name: str) -> EvidenceDetail | None:
        """One evidence bundle, opened; None when there is none of this name."""
        return self._ask(f"/observe/evidence/{quote(name, safe='')}", EvidenceDetail)

    def explain(self, rid: str, lang: Lang = ENGLISH) -> Explanation | None:
        """Sentences about one request; None when the engine does not know it (any more).

        English from an older engine, which has no other.
        """
        path = f"/observe/explain/{quote(rid, safe='')}"
        try:
            return self._ask(path, Explanation, None if lang == ENGLISH else {"lang": lang})
        except BadQuestion as refused:
            if refused.detail.field != "lang":
                raise
            return self._ask(path, Explanation)

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _must(self, path: str, model: type[_A], params: Mapping[str, int | str] | None = None) -> _A:
        answer = self._ask(path, model, params)
        if answer is None:
            raise self._unavailable(f"{self.url}{path} is not there: is this an admitscope engine?", "foreign")
        return answer

    def _ask(self, path: str, model: type[_A], params: Mapping[str, int | str] | None = None) -> _A | None:
        try:
            reply = self._client.get(path, params=params)
        except httpx.HTTPError as error:
            # A closed connection or a timeout of httpx may have no text of its own.
            raise self._unavailable(f"{self.url} does not answer: {str(error) or type(error).__name__}") from error
        if reply.status_code == httpx.codes.NOT_FOUND:
            return None
        if reply.status_code == httpx.codes.BAD_REQUEST:
            raise BadQuestion(self._error_body(reply))
        if reply.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise self._unavailable(f"{self.url} answers {reply.status_code}: it wants another API key", "key")
        if reply.status_code != httpx.codes.OK:
            raise self._unavailable(f"{self.url}{path} answers {reply.status_code}", "failed")
        return self._parsed(path, reply, model)

    def _parsed(self, path: str, reply: httpx.Response, model: type[_A]) -> _A:
        try:
            answer = model.model_validate_json(reply.content)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, e["loc"])) for e in error.errors()[:5])
            raise self._unavailable(
                f"{self.url}{path} sent something else: wrong at {fields or 'the body'}", "foreign"
            ) from error
        if answer.observe_version > OBSERVE_VERSION:
            raise self._unavailable(
                f"{self.url} speaks observe version {answer.observe_version}, this client knows {OBSERVE_VERSION}",
                "version",
            )
        with self._lock:
            self._last_contact = time.time()
        return answer

    def _error_body(self, reply: httpx.Response) -> ObserveError:
        try:
            return ObserveError.model_validate_json(reply.content)
        except ValidationError:
            return ObserveError(error=f"refused with {reply.status_code}")

    def _unavailable(self, message: str, kind: Kind = "unreachable") -> SourceUnavailable:
        return SourceUnavailable(message, last_contact_wall_s=self._last_contact, kind=kind)


def engine_url(text: str) -> str:
    """Where an engine listens, from what a person has at hand: with a slash at the end, or its OpenAI base URL."""
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def refuse_odd(url: str) -> None:
    """Raise ConfigError for what no request could be sent to: said once, before the first one."""
    try:
        parsed = httpx.URL(url)
        if parsed.userinfo:
            # Not quoted: other users could read it, and it would stand on the page as the engine's name.
            raise ConfigError("url: has a name or a password before @; ADMITSCOPE_API_KEY is the place of a key")
        parsed.host.encode("idna")
        # httpx takes a port that no socket has, modulo 65,536.
        is_odd = parsed.scheme not in {"http", "https"} or not parsed.host or not 0 < (parsed.port or 80) <= _MAX_PORT
    except (httpx.InvalidURL, UnicodeError):
        is_odd = True
    if is_odd or any(letter.isspace() for letter in url) or parsed.query or parsed.fragment:
        raise ConfigError(
            f"url={url[:200]!r}: must look like http://host:port, port at most {_MAX_PORT}, no ? and no #"
        )
