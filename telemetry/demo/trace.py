"""Rows of the Azure conversation trace. Owns: reading the shipped sample and scaling its lengths to a machine."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

DATA_DIR: Final = Path(__file__).parent / "data"
AZURE_ROWS: Final = 4000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of the trace; lengths in tokens."""

    context_tokens: int
    generated_tokens: int


def load_rows(limit: int = AZURE_ROWS) -> tuple[TraceRow, ...]:
    """The first `limit` rows of the shipped sample, in arrival order; at most 4,000."""
    if not 1 <= limit <= AZURE_ROWS:
        raise ValueError(f"limit={limit}: the shipped sample has 1 to {AZURE_ROWS} rows")
    rows: list[TraceRow] = []
    with gzip.open(DATA_DIR / "azure_conv_2023.csv.gz", "rt", encoding="ascii", newline="") as file:
        for line in csv.DictReader(file):
            rows.append(TraceRow(int(line["ContextTokens"]), int(line["GeneratedTokens"])))
            if len(rows) == limit:
                break
    return tuple(rows)


class Scale(NamedTuple):
    """Divide a length by `divisor`, rounded down, then clip it to [low, high]."""

    divisor: int
    low: int
    high: int

    def of(self, tokens: int) -> int:
        return min(max(tokens // self.divisor, self.low), self.high)


def scaled(row: TraceRow, *, context: Scale, generated: Scale) -> TraceRow:
    """The row with both lengths scaled to what a machine can do."""
    return TraceRow(context.of(row.context_tokens), generated.of(row.generated_tokens))
