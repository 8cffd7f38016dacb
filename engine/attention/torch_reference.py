"""TorchReferenceBackend. Owns: attention written to be read, the oracle that faster backends are tested against.

Gather each request's K/V by page id, score, mask, softmax, weigh. Slow on purpose; do not tune it.
"""

from __future__ import annotations

import torch

from engine.attention.metadata import PagedMetadata


class TorchReferenceBackend:
    """One request at a time, one line per step of the definition.

    compute_dtype   type of the arithmetic; None keeps the type of the inputs. float64 makes an oracle for float32.
    windows         see LlamaConfig.windows; () when every layer sees everything
    """

    name = "reference"

    def __init__(self, *, compute_dtype: torch.dtype | None = None, windows: tuple[int, ...] = ()) -> None:
        self._compute_dtype = compute_dtype
        self._windows = windows
        self._metadata: PagedMetadata | None = None

    def prepare(self, metadata: PagedMetadata) -> None:
        """Keep the batch description for the layers of this step."""
        self._metadata = metadata

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D] -> [R, Hq, D] in q's type."""
        meta = self._metadata
        if meta is None:
            raise RuntimeError("run() was called before prepare(): the batch is not known")
        dtype = self._compute_dtype or q.dtype
        out = torch.empty_like(q)
        window = self._windows[layer] if self._windows else 0
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            first, end = meta.qo_indptr[i : i + 2].tolist()
            if first == end:
                continue
            pages = torch.from_numpy(meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]].astype("int64"))
            keys = _tokens(k_cache, pages, seq_len).to(dtype)
            values = _tokens(v_cache, pages, seq_len).to(dtype)
            rows = q[first:end].to(dtype)
            out[first:end] = _attend(rows, keys, values, causal=meta.causal, window=window).to(q.dtype)
        return out


def _tokens(cache: torch.Tensor, pages: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first `seq_len` tokens of the listed pages, [seq_len, Hkv, D]. Unwritten slots are cut off here."""
    return cache[pages].flatten(0, 1)[:seq_len]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool, window: int = 0
) -> torch.Tensor:
    """Masked softmax attention of one request: q [n, Hq, D], keys and values [S, Hkv, D] -> [n, Hq, D]."""
    num_rows, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("nhd,shd->hns", q, keys) * head_dim**-0.5
    if causal:
        row_position = torch.arange(seq_len - num_rows, seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)[None, :]
        scores = scores.masked_fill(key_position > row_position, float("-inf"))
        if window:
            scores = scores.masked_fill(key_position <= row_position - window, float("-inf"))
    return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), values)
