"""The page of spans. Owns: docs/reference/spans.md, generated from the span catalogue and the rules that keep traces.

python -m telemetry.spans.page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from telemetry.spans.catalog import BLOCKER, NOT_KEPT, REQUEST, STEP, Attribute, SpanKind
from telemetry.spans.config import TraceConfig
from telemetry.spans.keep import KEPT_BECAUSE, MANY_CHUNKS
from telemetry.spans.step_tree import ONE_IN, SLOW_FACTOR, STEP_KEPT_BECAUSE

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "spans.md"
_WORDS: Final = {str: "text", int: "integer", float: "number", bool: "yes or no", tuple: "list of text"}
_HEAD: Final = f"""# Spans

Generated from `telemetry/spans/` by `python -m telemetry.spans.page`. Do not edit.

`serve --traces.endpoint http://collector:4318` sends traces over OTLP ([settings](configuration.md)). Nothing is built
while a request lives: when it ends it is kept or not, and its spans are made then, from the records, by a thread of
their own, with the times of the records. No prompt, no output and no token is ever in a span.

A request joins the trace of its caller (`traceparent`), or gets one of its own; the answer names it either way. The ids
of spans follow from the id of the request or the number of the step, so whoever has a record can name its span.
`{BLOCKER}` in a name stands for a blocker of [the metrics](metrics.md#label-values), or for `{NOT_KEPT}`: the beginning
of a very long wait, of which only the end is kept in detail.

New attributes, events and spans may come with any release. A name keeps its meaning and its type; another meaning gets
another name.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "\n## Which are kept\n\n", _kept()]
    for title, kinds in (("A request", REQUEST), ("A step", STEP)):
        parts.append(f"\n## {title}\n")
        parts += [_section(kind) for kind in kinds]
    return "".join(parts).rstrip() + "\n"


def _kept() -> str:
    fields = TraceConfig.model_fields
    ratio, rate = fields["sample_ratio"].default, fields["max_traces_per_s"].default
    lines = ["The first that applies is in `admitscope.kept_because`.\n", "| Request | Why |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in KEPT_BECAUSE.items()]
    lines += ["\n| Step | Why |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in STEP_KEPT_BECAUSE.items()]
    lines.append(
        f"\nBy default `traces.sample_ratio` is {ratio:g}; many chunks are more than {MANY_CHUNKS}; a step is slow at"
        f" {SLOW_FACTOR} times the\nmedian of its kind; one step in {ONE_IN:,} is kept whatever it was. At most"
        f" `traces.max_traces_per_s` ({rate:g}) requests and\nas many steps leave per second on average; those beyond"
        ' are counted in `spans_exported_total{outcome="dropped"}`.\n'
    )
    return "\n".join(lines)


def _section(kind: SpanKind) -> str:
    lines = [f"\n### `{kind.name}`\n", f"{kind.covers} Parent: {kind.parent}.\n"]
    if kind.attributes:
        lines += [*_table(kind.attributes), ""]
    for event in kind.events:
        most = f" At most {event.most} on one span." if event.most is not None else ""
        lines += [f"Event `{event.name}`: {event.when}{most}\n", *_table(event.attributes), ""]
    if kind.links:
        lines.append(f"Links: {kind.links}.\n")
    if kind.errors:
        lines.append(f"`error.type`: {kind.errors}.\n")
    return "\n".join(lines).rstrip() + "\n"


def _table(attributes: tuple[Attribute, ...]) -> Iterator[str]:
    yield "| Attribute | Type | | Meaning |"
    yield "|---|---|---|---|"
    for one in attributes:
        yield f"| `{one.name}` | {_WORDS[one.kind]} | {'' if one.always else 'where known'} | {one.meaning} |"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
