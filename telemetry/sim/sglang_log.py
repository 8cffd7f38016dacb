"""SGLang's request logs. Owns: requests with their lengths from what a running SGLang writes about each of them.

Two kinds, both JSON lines, as SGLang 0.5.23 writes them:

    --log-requests --log-requests-format json     `request.finished` has obj (what was asked for) and out.meta_info;
                                                  `request.received` the moment of arrival. A server's other output may
                                                  stand between such lines, and a time in brackets before each.
    --export-metrics-to-file                      an object for each request: meta_info, and request_parameters as JSON

Lines come as requests end, so all are read before the first is handed out; 48 bytes of each are kept. Neither kind
tells who shared a prefix with whom. Prompts and answers that a log may hold are not read.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from telemetry.sim.traces import MOST_TOKENS, Trace, TraceError, field_first, within
from telemetry.sim.workload import Ask

FINISHED: Final = '"event": "request.finished"'
_RECEIVED: Final = '"event": "request.received"'
_HEALTH_CHECK: Final = "HEALTH_CHECK"
#: Seconds since 1970 of the year 2200, and the longest life of a request that is believed: a week.
_MOST_S: Final = 7_258_118_400
_MOST_LIFE_S: Final = 604_800
#: Of what a request did not say.
_UNSET: Final = -1
_UNSET_PRIORITY: Final = -(2**62)
#: How a request ended, and whether it ignored end tokens: bits of `_Kept.ending`.
_STOPPED, _ABORTED, _IGNORES_EOS = 1, 2, 4


class _Reason(msgspec.Struct):
    type: str = ""


class Meta(msgspec.Struct):
    """What SGLang says of an answer. Seconds since 1970 where a name ends in `ts`; `e2e_latency` in seconds."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    e2e_latency: float | None = None
    request_received_ts: float | None = None
    response_sent_to_client_ts: float | None = None
    finish_reason: _Reason | None = None
    id: str | None = None


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None
    ignore_eos: bool | None = None


class _Asked(msgspec.Struct):
    sampling_params: _Sampling | None = None
    priority: int | None = None
    routing_key: str | None = None


class _Out(msgspec.Struct):
    meta_info: Meta


class _Event(msgspec.Struct):
    timestamp: datetime
    rid: str | None = None


class _Finished(_Event, kw_only=True):
    obj: _Asked = msgspec.field(default_factory=_Asked)
    out: _Out


class _Exported(Meta):
    request_parameters: str = "{}"


class _Kept:
    """Numbers of every request, in the order of the file."""

    def __init__(self) -> None:
        self.line, self.arrival_ns, self.life_ns = array("q"), array("q"), array("q")
        self.prompt, self.output, self.most = array("i"), array("i"), array("i")
        self.priority, self.key, self.ending = array("q"), array("i"), array("b")
        self.keys: dict[str, int] = {}


class SglangLog(Trace):
    """Common to both kinds: requests in the order of arrival, though lines are in the order of ends."""

    def __init__(self, file: Path, *, limit: int | None, ask_for: int | None) -> None:
        super().__init__(file, limit=limit, ask_for=ask_for)
        self._kept: _Kept | None = None
        self._without_lengths = 0
        self._cached = self._prompts = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the log lacks."""
        self._read()
        notes = []
        if self._prompts:
            share = self._cached / self._prompts
            notes.append(
                f"{self.name}: SGLang found {share:.1%} of the prompt tokens in its cache; the log does not say who "
                "shared what, so here no prompt shares anything"
            )
        if self._without_lengths:
            notes.append(
                f"{self.name}: {self._without_lengths} requests have no lengths (turned away, or no text was made) and "
                "are left out"
            )
        return tuple(notes)

    def total(self) -> int:
        rows = len(self._read().line)
        return rows if self._limit is None else min(rows, self._limit)

    def _rows(self) -> Iterator[Ask]:
        kept = self._read()
        keys: list[str | None] = [*kept.keys, None]
        times = np.array(kept.arrival_ns, dtype=np.int64)
        first = int(times.min()) if len(times) else 0
        for at in np.argsort(times, kind="stable").tolist():
            ending, output, asked = kept.ending[at], kept.output[at], kept.most[at]
            cut = bool(ending & _ABORTED)
            arrival_ns = kept.arrival_ns[at] - first
            most = max(asked, output, self._ask_for or 0)
            ask = self._ask(
                kept.line[at], arrival_ns=arrival_ns, prompt=kept.prompt[at], output=max(output, 1), ids=None
            )
            yield replace(
                ask,
                # Who left would have gone on, as far as is known.
                output_len=max(most, 1) if cut else ask.output_len,
                max_new_tokens=max(most, 1),
                ignore_eos=bool(ending & _IGNORES_EOS) or (asked == _UNSET and self._ask_for is None),
                priority=None if kept.priority[at] == _UNSET_PRIORITY else kept.priority[at],
                routing_key=keys[kept.key[at]],
                stops=bool(ending & _STOPPED),
                abort_ns=arrival_ns + kept.life_ns[at] if cut else None,
            )

    def _read(self) -> _Kept:
        """Every line, once."""
        if self._kept is None:
            kept = _Kept()
            for number, line in enumerate(self._lines(), 1):
                where = f"{self.file}:{number}"
                try:
                    self._take(kept, number, where, line)
                except msgspec.ValidationError as error:
                    raise TraceError(f"{where}: {field_first(str(error))}") from error
                except (msgspec.DecodeError, RecursionError) as error:
                    raise TraceError(f"{where}: no JSON object: {error}") from error
            self._kept = kept
        return self._kept

    @abstractmethod
    def _take(self, kept: _Kept, number: int, where: str, line: str) -> None:
        """Keep what `line` says of a request that ended."""

    def _keep(self, kept: _Kept, number: int, where: str, meta: Meta, asked: _Asked, arrival_s: float) -> None:
        prompt, output = meta.prompt_tokens, meta.completion_tokens
        if prompt is None or output is None:
            self._without_lengths += 1
            return
        sampling = asked.sampling_params or _Sampling()
        most, life_s = sampling.max_new_tokens, meta.e2e_latency or 0.0
        within(where, "prompt_tokens", prompt, 1, MOST_TOKENS)
        within(where, "completion_tokens", output, 0, MOST_TOKENS)
        within(where, "arrival (seconds since 1970)", arrival_s, 0, _MOST_S)
        within(where, "e2e_latency", life_s, 0, _MOST_LIFE_S)
        if most is not None:
            within(where, "max_new_tokens", most, 0, 2**31 - 1)
        if asked.priority is not None:
            within(where, "priority", asked.priority, -(2**31), 2**31 - 1)
        self._prompts += prompt
        self._cached += min(meta.cached_tokens or 0, prompt)
        reason = "" if meta.finish_reason is None else meta.finish_reason.type
        ending = {"stop": _STOPPED, "abort": _ABORTED}.get(reason, 0) | (_IGNORES_EOS if sampling.ignore_eos else 0)
        kept.line.append(number)
        kept.arrival_ns.append(round(arrival_s * 1e6) * 1_000)  # a float of such size knows no nanoseconds
        kept.life_ns.append(round(life_s * 1e9))
        kept.prompt.append(prompt)
        kept.output.append(output)
        kept.most.append(_UNSET if most is None else min(most, MOST_TOKENS))
        kept.priority.append(_UNSET_PRIORITY if asked.priority is None else asked.priority)
        kept.key.append(-1 if asked.routing_key is None else kept.keys.setdefault(asked.routing_key, len(kept.keys)))
        kept.ending.append(ending)


class SglangRequestLog(SglangLog):
    """`--log-requests --log-requests-format json`, alone or within a server's output."""

    def __init__(self, file: Path, *, limit: int | None, ask_for: int | None) -> None:
        super().__init__(file, limit=limit, ask_for=ask_for)
        self._received: dict[str, float] = {}
        self._events = msgspec.json.Decoder(_Event)
        self._ends = msgspec.json.Decoder(_Finished)

    def _take(self, kept: _Kept, number: int, where: str, line: str) -> None:
        if _RECEIVED in line:
            event = self._events.decode(_object(line))
            if event.rid is not None:
                self._received[event.rid] = _since_1970(where, event.timestamp)
            return
        if FINISHED not in line:
            return
        done = self._ends.decode(_object(line))
        came_s = None if done.rid is None else self._received.pop(done.rid, None)
        if done.rid is not None and done.rid.startswith(_HEALTH_CHECK):
            return
        meta = done.out.meta_info
        if meta.request_received_ts is not None:
            came_s = meta.request_received_ts  # of another clock than the times of lines: where it is, it is for all
        if came_s is None:
            if meta.e2e_latency is None:
                raise TraceError(
                    f"{where}: nothing says when it came: neither a request.received line of {str(done.rid)[:80]!r}, "
                    "nor request_received_ts, nor e2e_latency"
                )
            came_s = _since_1970(where, done.timestamp) - meta.e2e_latency
        self._keep(kept, number, where, meta, done.obj, came_s)


class SglangExport(SglangLog):
    """`--export-metrics-to-file`: sglang-request-metrics-YYYYMMDD_HH.log."""

    def __init__(self, file: Path, *, limit: int | None, ask_for: int | None) -> None:
        super().__init__(file, limit=limit, ask_for=ask_for)
        self._records = msgspec.json.Decoder(_Exported)
        self._parameters = msgspec.json.Decoder(_Asked)

    def _take(self, kept: _Kept, number: int, where: str, line: str) -> None:
        if not line.strip():
            return
        meta = self._records.decode(line)
        if meta.id is not None and meta.id.startswith(_HEALTH_CHECK):
            return
        try:
            asked = self._parameters.decode(meta.request_parameters)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TraceError(f"{where}: request_parameters: {field_first(str(error))}") from error
        came_s = meta.request_received_ts
        if came_s is None and meta.response_sent_to_client_ts is not None and meta.e2e_latency is not None:
            came_s = meta.response_sent_to_client_ts - meta.e2e_latency
        if came_s is None:
            raise TraceError(
                f"{where}: no request_received_ts, so nothing says when it came: SGLang writes it with --enable-metrics"
            )
        self._keep(kept, number, where, meta, asked, came_s)


def _since_1970(where: str, moment: datetime) -> float:
    """Seconds. Raises TraceError for a moment that no clock of a server shows."""
    try:
        return moment.timestamp()
    except (ValueError, OverflowError, OSError) as error:  # years near 1, whose local time is before all
        raise TraceError(f"{where}: timestamp is {moment.isoformat()}; a moment from 1970 on is needed") from error


def _object(line: str) -> str:
    """The JSON object of a line that may begin with a time in brackets."""
    return line[max(line.find("{"), 0) :]
