"""RMS norm. Owns: the one that is quickest where the rows are.

torch has no kernel of its own for it on a CPU but a row of steps, each of which goes from bfloat16 to float32 and back;
here the rows are converted once. In float32 torch's own is as good.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] scaled to a mean square of 1 over the last axis, times `weight` [..., H]; in the type of `x`."""
    if x.device.type != "cpu" or x.dtype is torch.float32:
        if weight.ndim == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    rows = x.float()
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    scale = torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return rows.mul_(scale).mul_(weight).to(x.dtype)


@cache
def _number(value: float) -> torch.Tensor:
    """`value` as a tensor, which lets it take part in one step with tensors."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)
