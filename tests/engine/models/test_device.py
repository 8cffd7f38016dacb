"""A model on a device that is not the CPU: every tensor of a step is where the weights are.

torch's fake tensors have shapes and devices but no values, and refuse operators over tensors of two devices, as a GPU
does. The device is `meta`: a CPU build of torch offers no other that is not the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.attention.metadata import PagedMetadata
from engine.attention.torch_reference import TorchReferenceBackend
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.linear import Linear
from engine.models.llama import LayerCache, LlamaModel
from engine.models.llama_config import LlamaConfig, RopeScaling
from engine.models.ops import MakeOps, TorchOps
from engine.models.weights import move
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.ragged import metadata_of
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG, tiny_weights

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _fake_tensors() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


ROWS, SLOTS = 5, 32


class ShapesOnly:
    """Attention that answers where q is."""

    name = "shapes"

    def prepare(self, metadata: PagedMetadata) -> None: ...

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        assert {q.device, k_cache.device, v_cache.device} == {META}
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def on_meta(config: LlamaConfig, dtype: torch.dtype, *, head_norms: bool, make_ops: MakeOps = TorchOps) -> LlamaModel:
    weights = tiny_weights(dtype=dtype)
    for layer in weights.layers:
        layer.qkv_bias = torch.zeros(len(layer.qkv), dtype=dtype)
        if head_norms:
            layer.q_norm = layer.k_norm = torch.ones(config.head_dim, dtype=dtype)
    move(weights, META)
    return LlamaModel(config, weights, make_ops=make_ops)


@pytest.mark.parametrize("rows", [None, [1, 4], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, RopeScaling("yarn", 4.0), RopeScaling("factors", 2.0, factors=(1.0,) * 4)])
@pytest.mark.parametrize("is_flashinfer", [False, True])
def test_a_step_stays_on_the_device(
    rows: list[int] | None, dtype: torch.dtype, scaling: RopeScaling | None, is_flashinfer: bool
) -> None:
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    # Kernels are started and never done: there is nothing that they could compute with.
    module = ShapedFlashInfer(LateDevice(), operator_types=(dtype,))
    make_ops = partial(FlashInferOps, kernels=module) if is_flashinfer else TorchOps
    model = on_meta(config, dtype, head_norms=scaling is None, make_ops=make_ops)
    assert model.device == META
    model.reserve_positions(64)
    shape = (SLOTS // 16, 16, CONFIG.num_kv_heads, CONFIG.head_dim)
    caches = []
    for _ in range(CONFIG.num_layers):
        k, v = torch.empty(2, *shape, dtype=dtype, device=META)
        caches.append(LayerCache(k=k, v=v, k_slots=k.flatten(0, 1), v_slots=v.flatten(0, 1)))
    tokens, positions, slots = (torch.zeros(ROWS, dtype=torch.int64, device=META) for _ in range(3))
    wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64).to(META)
    logits = model.forward(tokens, positions, slots, caches=caches, attention=ShapesOnly(), rows=wanted)
    assert logits.device == META
    assert logits.shape == (ROWS if rows is None else len(rows), CONFIG.vocab_size)
    assert logits.dtype is dtype
    assert bool(module.calls) == is_flashinfer


def test_the_meta_device_notices_a_stray_tensor() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.linear(torch.zeros(2, 3, device=META), torch.zeros(4, 3))


def test_moving_keeps_tied_embeddings_one_tensor_and_absent_biases_absent() -> None:
    weights = tiny_weights()
    move(weights, META)
    assert weights.lm_head is weights.embedding
    assert weights.layers[0].qkv.device == META
    assert weights.layers[0].qkv_bias is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_made_for_a_cpu_stay_on_the_cpu(dtype: torch.dtype) -> None:
    assert Linear(torch.empty(8, 4, dtype=dtype, device=META)).layout == "stored"


def test_weights_of_an_untied_head_move_too() -> None:
    weights = tiny_weights()
    weights.lm_head = weights.embedding.clone()
    move(weights, META)
    assert weights.lm_head is not weights.embedding
    assert weights.lm_head.device == META


def test_the_reference_backend_computes_where_the_cache_is() -> None:
    batch = metadata_of([(3, 20), (1, 5)], [[1, 0], [2]], 16)
    backend = TorchReferenceBackend(windows=(7,))
    backend.prepare(batch)
    q = torch.zeros(4, 6, 8, device=META)
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 8, device=META)
    assert backend.run(q, k_cache, v_cache, 0).device == META
