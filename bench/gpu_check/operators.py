"""Section 3, beside K/V writes. Owns: FlashInfer's small operators against float64, and what they must leave alone.

Each of them computes in float32 and rounds once, at its end: its error is held against one rounding of its type.
torch's form, which rounds in between, is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.gpu_check.random_model import shape
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import FLASHINFER, TORCH, Rig
from engine.models.llama_config import LlamaConfig
from engine.models.ops import HeadNorms, Ops
from engine.models.rope import cos_sin_cache

#: Largest error of an element, in steps of its type: half a step is one rounding, the rest is for sums in float32.
MOST_STEPS = 0.6
#: Size from which on an element has steps of its own; of smaller ones, differences of larger numbers, it is this one's.
SMALLEST = 1e-3
ROWS = (1, 37, 300)
#: Positions are drawn below this one, and include the last.
POSITIONS = 2048


@dataclass(slots=True)
class _Inputs:
    """hidden, added [R, H]; qkv [R, (Hq + 2 Hkv) D]; gate_up [R, 2 ffn]; positions [R]; weight [H]."""

    hidden: torch.Tensor
    added: torch.Tensor
    qkv: torch.Tensor
    gate_up: torch.Tensor
    positions: torch.Tensor
    weight: torch.Tensor
    norms: HeadNorms


@dataclass(frozen=True, slots=True)
class _Given:
    """A product whose answer is `rows`, which may be written over."""

    rows: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        del x
        return self.rows

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        del x
        return base.add_(self.rows)


def operators(rig: Rig) -> Iterator[Finding]:
    """Norm, norm of a sum, norms of heads, RoPE in place, and activation, at every shape of heads."""
    for kv_heads, dim, group in rig.sizes.heads:
        hidden = kv_heads * group * dim
        config = shape(
            layers=1, hidden=hidden, ffn=3 * hidden, heads=kv_heads * group, kv_heads=kv_heads, head_dim=dim, vocab=64
        )
        like = torch.empty(0, dtype=rig.sizes.dtype, device=rig.device)
        tables = {name: make(config, like) for name, make in rig.ops().items()}
        for table in tables.values():
            table.reserve_positions(POSITIONS)
        errors: dict[str, dict[str, float]] = {name: {} for name in tables}
        untouched = True
        for rows in ROWS:
            inputs = _drawn(rig, config, rows)
            want = _exact(config, inputs)
            for name, table in tables.items():
                got, kept = _computed(table, inputs)
                rig.runtime.synchronize()
                untouched &= kept
                for operator, answer in got.items():
                    worst = _steps(answer, want[operator])
                    errors[name][operator] = max(worst, errors[name].get(operator, 0.0))
        for operator, worst in errors[FLASHINFER].items():
            note = f"{TORCH}: {errors[TORCH][operator]:.2f}"
            name = f"D {dim}, group {group}, {operator}"
            yield Finding(name, worst <= MOST_STEPS, worst, "steps", MOST_STEPS, note)
        yield Finding(f"D {dim}, group {group}: v and the rows around keep their bits", untouched)


def _drawn(rig: Rig, config: LlamaConfig, rows: int) -> _Inputs:
    generator = torch.Generator(device=rig.device).manual_seed(int(rig.rng.integers(2**31)))

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=rig.device).to(rig.sizes.dtype)

    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    positions = torch.from_numpy(rig.rng.integers(0, POSITIONS, rows)).to(rig.device)
    positions[-1] = POSITIONS - 1
    q, k = 1 + draw(dim), 1 + draw(dim)
    return _Inputs(
        hidden=draw(rows, config.hidden_size) * 8,
        added=draw(rows, config.hidden_size),
        qkv=draw(rows, (heads + 2 * kv_heads) * dim),
        gate_up=draw(rows, 2 * config.intermediate_size),
        positions=positions,
        weight=1 + draw(config.hidden_size),
        norms=HeadNorms(q, k, torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))),
    )


def _exact(config: LlamaConfig, inputs: _Inputs) -> dict[str, torch.Tensor]:
    """Every answer in float64, by its definition; only the table of angles is the engine's."""
    eps, dim = config.rms_norm_eps, config.head_dim

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()

    table = cos_sin_cache(config, POSITIONS).to(inputs.qkv.device).double()
    cos, sin = table.index_select(0, inputs.positions)[:, None].chunk(2, dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    total = inputs.hidden.double() + inputs.added.double()
    heads = inputs.qkv.double().view(len(total), -1, dim)[:, : config.num_heads + config.num_kv_heads]
    gate, up = inputs.gate_up.double().chunk(2, dim=-1)
    return {
        "norm": norm(inputs.hidden.double(), inputs.weight),
        "sum": total,
        "norm of the sum": norm(total, inputs.weight),
        "RoPE": turned(heads),
        "norms of heads": norm(heads, inputs.norms.stacked),
        "activation": gate * torch.sigmoid(gate) * up,
    }


def _computed(table: Ops, inputs: _Inputs) -> tuple[dict[str, torch.Tensor], bool]:
    """Every answer by `table`, and whether v and the rows before and behind kept their bits."""
    around_hidden, hidden = _with_neighbours(inputs.hidden)
    around_added, added = _with_neighbours(inputs.added)
    around_qkv, qkv = _with_neighbours(inputs.qkv)
    before = [around.clone() for around in (around_hidden, around_added, around_qkv)]
    angles = table.angles(inputs.positions)
    norm = table.rms_norm(inputs.hidden, inputs.weight)
    total, normed = table.add_norm(hidden, _Given(added), inputs.hidden, inputs.weight)
    # Position 0 turns nothing: what is seen is the norm.
    unturned = table.angles(torch.zeros_like(inputs.positions))
    heads = torch.cat(table.turned(inputs.qkv.clone(), inputs.norms, unturned), dim=1)
    turned = torch.cat(table.turned(qkv, None, angles), dim=1)
    v = turned.shape[1] * turned.shape[2]
    kept = torch.equal(around_qkv[:, v:], before[2][:, v:])
    for around, was in zip((around_hidden, around_added, around_qkv), before, strict=True):
        kept &= torch.equal(around[[0, -1]], was[[0, -1]])
    return {
        "norm": norm,
        "sum": total,
        "norm of the sum": normed,
        "RoPE": turned,
        "norms of heads": heads,
        "activation": table.silu_and_mul(inputs.gate_up),
    }, kept


def _with_neighbours(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of `rows` with a row before and one behind: all of it, and the copy alone."""
    around = torch.cat((rows[:1], rows, rows[-1:]))
    return around, around[1:-1]


def _steps(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of an element, in steps of the type of `got` at that element; infinite for NaN."""
    step = torch.finfo(got.dtype).eps * want.abs().clamp_min(SMALLEST)
    return float(((got.double() - want).abs() / step).nan_to_num(nan=float("inf")).max())
