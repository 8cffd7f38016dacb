"""What the demo shows. Owns: the tally of finished requests, the status line and the summary."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from telemetry.demo.scrape import Scrape
from telemetry.demo.stream_client import quantile

#: Requests and gaps that the live line looks back on.
_RECENT: Final = 200
_SHOWN_REASONS: Final = 3


@dataclass(slots=True)
class Tally:
    """What the load generator said so far: the clients' side of the story. Seconds.

    slowest  the longest TTFT, and the id of its request
    """

    finished: int = 0
    failed: list[str] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    recent_ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    recent_gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    rate: float | None = None
    sent: int | None = None
    cut: int = 0
    sample: dict[str, str] | None = None
    slowest: tuple[float, str] = (0.0, "")

    def take(self, line: dict[str, Any]) -> None:
        """Account for one line of the load generator."""
        match line["kind"]:
            case "rate":
                self.rate = line["per_second"]
            case "done" if line["error"] is not None:
                self.failed.append(line["error"])
            case "done":
                self.finished += 1
                self.finish_reasons[str(line["finish"])] += 1
                self.prompt_tokens += line["prompt_tokens"]
                self.output_tokens += line["output_tokens"]
                if line["ttft_s"] is not None:
                    self.ttft_s.append(line["ttft_s"])
                    self.recent_ttft_s.append(line["ttft_s"])
                    self.slowest = max(self.slowest, (line["ttft_s"], line["id"]))
                self.gaps_s.extend(line["gaps_s"])
                self.recent_gaps_s.extend(line["gaps_s"])
            case "end":
                self.sent, self.cut, self.sample = line["sent"], line["cut"], line["sample"]
            case unknown:
                raise ValueError(f"the load generator said kind={unknown!r}")


def refusals(scrape: Scrape) -> dict[str, float]:
    """Examinations that did not admit, by reason, largest first."""
    by_reason = scrape.by("admissions_total", "reason")
    return {reason: count for reason, count in by_reason.items() if not reason.startswith("admitted_")}


def status_line(scrape: Scrape, before: Scrape, seconds: float, tally: Tally) -> Text:
    """One line: what the engine does now. `before` was read `seconds` earlier."""
    tokens = scrape.total("generation_tokens_total") - before.total("generation_tokens_total")
    waiting = scrape.total("requests", state="waiting") + scrape.total("requests", state="retracted")
    running = scrape.total("requests", state="prefill") + scrape.total("requests", state="decode")
    now = {
        reason: count - before.total("admissions_total", reason=reason) for reason, count in refusals(scrape).items()
    }
    why = [reason for reason, count in sorted(now.items(), key=lambda item: -item[1]) if count > 0][:_SHOWN_REASONS]
    violations = int(scrape.total("violations_total"))
    line = Text.assemble(
        ("waiting ", "dim"), f"{waiting:.0f}",
        ("  running ", "dim"), f"{running:.0f}",
        ("  done ", "dim"), f"{tally.finished}",
        ("  tok/s ", "dim"), f"{tokens / seconds:.0f}" if seconds > 0 else "-",
        ("  TTFT p50 ", "dim"), _milliseconds(quantile(tally.recent_ttft_s, 0.5)),
        ("  TBT p50 ", "dim"), _milliseconds(quantile(tally.recent_gaps_s, 0.5)),
        ("  violations ", "dim"), (str(violations), "green" if violations == 0 else "bold red"),
        ("  refused now: ", "dim"), ", ".join(why) or "none",
    )  # fmt: skip
    if tally.failed:
        line.append(f"  failed {len(tally.failed)}", style="bold red")
    return line


def summary(scrape: Scrape, tally: Tally, *, seconds: float) -> RenderableType:
    """The table at the end. Latencies by the clients' clocks, the rest from /metrics; one answer to read."""
    table = Table(title="admitscope demo", title_justify="left", show_header=False)
    table.add_column("what", style="dim", no_wrap=True)
    table.add_column("value")
    cached = scrape.total("prompt_tokens_total", source="cached")
    prompt = scrape.total("prompt_tokens_total")
    violations = scrape.by("violations_total", "id")
    ends = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.finish_reasons.items()))
    rows: list[tuple[str, str]] = [
        ("requests", _requests(tally, ends)),
        ("arrivals", f"{tally.rate:.2f} a second on average, in waves" if tally.rate else "not reached"),
        ("TTFT p50 / p99", _two(tally.ttft_s)),
        ("TBT p50 / p99", _two(tally.gaps_s)),
        ("output tokens", f"{tally.output_tokens:,} in {seconds:.0f} s, {tally.output_tokens / seconds:.1f} a second"),
        ("prompt tokens from cache", f"{cached:,.0f} of {prompt:,.0f}, {_share(cached, prompt)}"),
        ("admitted", _counts(scrape, admitted=True)),
        ("refused, by reason", _counts(scrape, admitted=False)),
        ("retractions", f"{scrape.total('retractions_total'):.0f}"),
        ("guards", _join(scrape.by("guard_activations_total", "guard"))),
        ("law checks", f"{scrape.total('invariant_checks_total'):,.0f}"),
        ("violations", _join(violations)),
    ]
    for what, value in rows:
        table.add_row(what, value, style="bold red" if what == "violations" and violations else None)
    parts: list[RenderableType] = [table]
    if tally.sample is not None:
        parts.append(_sample(tally.sample))
    parts.extend(Text(f"failed: {error}", style="red") for error in dict.fromkeys(tally.failed))
    return Group(*parts)


def _sample(sample: dict[str, str]) -> Panel:
    body = Text()
    body.append(sample["passage"] + "\n\n", style="dim")
    body.append("Q  " + sample["question"] + "\n")
    body.append("A  " + sample["answer"], style="bold")
    return Panel(body, title="one question and its answer", title_align="left", expand=False)


def _counts(scrape: Scrape, *, admitted: bool) -> str:
    by_reason = scrape.by("admissions_total", "reason")
    return _join({reason: n for reason, n in by_reason.items() if reason.startswith("admitted_") is admitted})


def _join(counts: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items()) or "none"


def _requests(tally: Tally, ends: str) -> str:
    sent = tally.sent if tally.sent is not None else tally.finished + len(tally.failed)
    cut = f", {tally.cut} cut short by Ctrl-C" if tally.cut else ""
    return f"{sent} sent, {tally.finished} finished ({ends or 'none'}), {len(tally.failed)} failed{cut}"


def _two(seconds: list[float]) -> str:
    return f"{_milliseconds(quantile(seconds, 0.5))} / {_milliseconds(quantile(seconds, 0.99))}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.0f} ms"
