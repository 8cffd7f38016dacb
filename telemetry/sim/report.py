"""A result in words and tables. Owns: what `admitscope sim` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from telemetry.sim.parts import CostUsed, Spread
from telemetry.sim.results import SimResult


def show_result(result: SimResult, console: Console) -> None:
    """The tables of a simulation."""
    changed = ", ".join(f"{name}={value}" for name, value in result.settings.items()) or "none"
    console.print(
        f"{result.workload}: {result.requests:,} requests, policy {result.policy}, set: {changed}",
        highlight=False,
        markup=False,
    )
    console.print(_times({"ttft": result.ttft, "tbt": result.tbt, "e2e": result.e2e}))
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(result):
        facts.add_row(name, value)
    console.print(facts)
    for line in (*cost_lines(result.cost), *result.notes):
        console.print(line, highlight=False, markup=False)


def _times(spreads: dict[str, Spread]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("virtual time", "count", "p50", "p90", "p99", "most"):
        table.add_column(name, justify="left" if name == "virtual time" else "right")
    words = {"ttft": "time to first token", "tbt": "time between tokens", "e2e": "until the last token"}
    for name, spread in spreads.items():
        times = (duration(value) for value in (spread.p50, spread.p90, spread.p99, spread.most))
        table.add_row(words[name], f"{spread.count:,}", *times)
    return table


def _facts(result: SimResult) -> list[tuple[str, str]]:
    rate = result.cache_hit_rate
    steps = ", ".join(f"{count:,} {kind}" for kind, count in result.steps_by_kind.items())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.reasons.items())
    facts = [
        ("ended", f"{result.served:,} by themselves, {result.cut:,} early, {result.refused:,} refused"),
        ("virtual duration", f"{result.duration_s:,.1f} s"),
        ("output", f"{result.output_tokens:,} tokens, {result.tokens_per_s:,.4g} a second"),
        ("prompts", f"{result.prompt_tokens:,} tokens, {result.prefill_tokens_per_s:,.4g} a second computed"),
        ("found in the cache", "nothing admitted" if rate is None else f"{rate:.1%} of prompt tokens"),
        ("steps", steps or "none"),
        ("pushed back", f"{result.retractions:,} times"),
        ("decisions", reasons or "none"),
        ("laws", "not checked" if result.violations is None else f"{result.violations} broken"),
        ("took", f"{result.wall_s:,.1f} s"),
    ]
    if result.violations:
        facts.append(("broken", ", ".join(f"{law} {count}" for law, count in result.violations_by_law.items())))
    if result.event_hash:
        facts.append(("hash of events", result.event_hash))
    if result.plots:
        facts.append(("plots", ", ".join(result.plots)))
    if result.journal:
        facts.append(("journal", result.journal))
    return facts


def cost_lines(cost: CostUsed) -> list[str]:
    """What the times are worth."""
    lines = [f"times: cost model {cost.name} ({cost.source})"]
    if cost.median_error is not None and cost.p95_error is not None and cost.bias is not None:
        lines.append(
            f"its error on {cost.held_out_steps} steps that it did not see: median {cost.median_error:.1%}, 95th "
            f"percentile {cost.p95_error:.1%}; in sum {change(cost.bias, 1)}"
        )
    if cost.note:
        lines.append(cost.note)
    return lines


def change(share: float, places: int = 0) -> str:
    """A share with its sign, as +12%; what rounds to 0 has none."""
    text = f"{share:+.{places}%}"
    return text if any(digit in "123456789" for digit in text) else text[1:]


def duration(seconds: float | None) -> str:
    """With the unit that fits."""
    if seconds is None:
        return "–"
    if abs(seconds) < 1e-3:
        return f"{round(seconds * 1e6)} µs"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
