"""Linear layers. Owns: the memory layout in which a weight matrix multiplies fastest on CPU.

Three layouts, chosen once at load (bench/executor_steps.py prints what they give):

- oneDNN's own blocked layout ("packed"), where this torch build offers it: in float32, too, up to four times as fast as
  torch's own product on an AMD processor (docs/adr/0036);
- [in, out] ("transposed"): float32 without packing, up to twice as fast as [out, in] for few rows;
- [out, in] as stored: bfloat16 without packing, and on a GPU.

In bfloat16 oneDNN takes another kernel for another number of rows, and another kernel rounds otherwise: a token may
change with its company. So bfloat16 products have one of a few row counts that a trial at load found to agree bit for
bit; fewer rows are filled up. A row is then the same bits alone and in company.

oneDNN keeps what it has compiled for a shape, some hundred KiB a row count and matrix, for a thousand shapes. float32
products have one of a few row counts too, closer to each other: there nothing has to agree, and zeros cost time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch.nn.functional import linear

#: Row counts that are tried, largest first.
ROW_COUNTS: Final = (256, 192, 128, 96, 64, 48, 32, 16)
#: Of float32, largest first. A few rows cost what reading the weights costs.
FLOAT32_ROW_COUNTS: Final = (
    256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 28, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1,
)  # fmt: skip
#: Batches that a choice among them is judged by.
_USUAL_ROWS: Final = (1, 8, 32, 64, 128, 256)
#: What reading the weights costs beside a product, in rows (SmolLM2's layers: a row costs 1/190 of them).
_READING_ROWS: Final = 192
#: (out, in, threads) -> row counts of one kind, largest first.
_agreeing: dict[tuple[int, int, int], tuple[int, ...]] = {}


class Fill:
    """Memory in which few rows are filled up to many, for the layers of one model, which take turns.

    New memory for each product costs more than the zeros in it: at one row a fifth of a product. What lies behind the
    rows is left from products before. It is somebody's, but it reaches no result: a product has no sums across rows.
    """

    __slots__ = ("_memory", "_views")

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        #: (width, rows, count) -> the first `rows` rows and the first `count` rows.
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def up(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x [R, in], of the layers' one type -> [count, in], valid until the next call. R < count."""
        rows, width = x.shape
        key = (width, rows, count)
        if (views := self._views.get(key)) is None:
            memory = self._memory.get(width)
            if memory is None:
                with torch.inference_mode(False):  # memory made within that mode cannot be written outside
                    memory = self._memory[width] = torch.zeros(ROW_COUNTS[0], width, dtype=x.dtype)
            views = self._views[key] = memory[:rows], memory[:count]
        views[0].copy_(x)
        return views[1]


class Linear:
    """y = x Wᵀ + bias."""

    __slots__ = ("_bias", "_fill", "_multiply_packed", "_packed", "_row_counts", "_stored", "_transposed", "layout")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        fill: Fill | None = None,
    ) -> None:
        """`weight` is [out, in], `bias` [out]; the weight is copied unless it is kept as stored.

        fill   shared by layers that are never used at the same time; None: one of its own
        """
        self._fill = Fill() if fill is None else fill
        self._bias = bias
        self._packed: Any = None
        self._stored: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self._multiply_packed: Any = None
        self._row_counts: tuple[int, ...] = ()
        if (packed := _pack(weight)) is not None:
            self._packed, self.layout = packed, "packed"
            self._multiply_packed = torch.ops.mkldnn._linear_pointwise.default
            if weight.dtype is torch.bfloat16:
                self._row_counts = self._agreeing_row_counts(*weight.shape)
            else:
                self._row_counts = FLOAT32_ROW_COUNTS
        elif weight.dtype is torch.float32 and weight.device.type == "cpu":
            self._transposed, self.layout = weight.t().contiguous(), "transposed"
        else:
            self._stored, self.layout = weight, "stored"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out]."""
        if self._transposed is not None:
            if self._bias is not None:
                return torch.addmm(self._bias, x, self._transposed)
            return torch.mm(x, self._transposed)
        if self._packed is not None:
            return self._in_row_counts(x)
        assert self._stored is not None
        return linear(x, self._stored, self._bias)

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """base + x Wᵀ + bias, where `base` [R, out] may be overwritten."""
        if self._transposed is not None:
            added = base.addmm_(x, self._transposed)
            return added if self._bias is None else added.add_(self._bias)
        if self._row_counts and x.shape[0] > self._row_counts[0]:
            # Part by part: they need not be put together first.
            for part in self._parts(x.shape[0]):
                base[part].add_(self._filled_up(x[part]))
            return base
        return base.add_(self(x))

    def _packed_product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._multiply_packed(x, self._packed, self._bias, "none", [], "")
        return y

    def _in_row_counts(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [R, in] by parts that each have one of the row counts."""
        if x.shape[0] <= self._row_counts[0]:
            return self._filled_up(x)
        return torch.cat([self._filled_up(x[part]) for part in self._parts(x.shape[0])])

    def _parts(self, rows: int) -> list[slice]:
        """`rows` rows in parts of the largest row count."""
        largest = self._row_counts[0]
        return [slice(start, start + largest) for start in range(0, rows, largest)]

    def _filled_up(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        count = _smallest(self._row_counts, rows)
        if rows == count:
            return self._packed_product(x)
        return self._packed_product(self._fill.up(x, count))[:rows]

    def _agreeing_row_counts(self, out: int, inner: int) -> tuple[int, ...]:
        """The cheapest of the kinds of row counts whose products agree, as a trial with this layer finds them."""
        key = (out, inner, torch.get_num_threads())
        if key not in _agreeing:
            x = torch.randn(ROW_COUNTS[0], inner, generator=torch.Generator().manual_seed(0)).bfloat16()
            kinds: list[tuple[torch.Tensor, list[int]]] = []
            for count in ROW_COUNTS:
                y = self._packed_product(x[:count])
                for first, counts in kinds:
                    if torch.equal(y, first[:count]):
                        counts.append(count)
                        break
                else:
                    kinds.append((y, [count]))
            _agreeing[key] = min((tuple(counts) for _, counts in kinds), key=_cost)
        return _agreeing[key]


@cache
def _smallest(counts: tuple[int, ...], rows: int) -> int:
    """The smallest of `counts` that holds `rows`; the largest where none does."""
    return min((count for count in counts if count >= rows), default=counts[0])


def _cost(counts: tuple[int, ...]) -> int:
    """What usual batches cost with these row counts, in rows."""
    total = 0
    for rows in _USUAL_ROWS:
        whole, rest = divmod(rows, counts[0])
        total += whole * (_READING_ROWS + counts[0])
        if rest:
            total += _READING_ROWS + _smallest(counts, rest)
    return total


def packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch has a layout of its own for matrices of this type."""
    return _pack(torch.zeros(16, 32, dtype=dtype)) is not None


def _pack(weight: torch.Tensor) -> Any:
    """The weight in oneDNN's layout, or None when this build of torch cannot: packing is not a public interface."""
    if weight.device.type != "cpu":
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise.default(probe, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # each: this build lacks it
        return None
    return packed
