"""Rows of the Azure conversation trace. Owns: reading the shipped sample and scaling its lengths to a machine."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


def scaled(row: TraceRow, *, divisor: int, context: tuple[int, int], generated: tuple[int, int]) -> TraceRow:
    """Both lengths divided (rounded down) and clipped to their inclusive (low, high) range."""
    return TraceRow(
        context_tokens=min(max(row.context_tokens // divisor, context[0]), context[1]),
        generated_tokens=min(max(row.generated_tokens // divisor, generated[0]), generated[1]),
    )
