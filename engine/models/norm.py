"""RMS norm. Owns: the one that is quickest where the rows are.

torch has no kernel of its own for it on a CPU but a row of steps, each of which goes from bfloat16 to float32 and back;
here the rows are converted once. In float32 torch's own is as good.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] scaled to a mean square of 1 over the last axis, times `weight` [..., H]; in the type of `x`."""
    if x.device.type != "cpu" or x.dtype is torch.float32:
        if weight.ndim == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    rows = x.float()
    squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
    scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return rows.mul_(scale).mul_(weight).to(x.dtype)
