"""A FlashInferBackend over a module of FlashInfer's shape and a device that is late with everything."""

from __future__ import annotations

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.attention.ragged import Ragged, Shape
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.late_operators import LateOperators, LateStream

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
HOLISTIC, POD = "BatchAttention", "BatchPODWithPagedKVCacheWrapper"
WRAPPERS = (PREFILL, DECODE, HOLISTIC, POD)
EVERY_MIXED = pytest.mark.parametrize("mixed", MixedKernel)
MIXED = [(40, 40), (17, 60), (1, 1), (1, 75), (1, 16), (0, 12), (5, 5), (1, 33), (1, 76)]
DECODES = [(1, 1), (1, 75), (1, 16), (1, 33)]


class Rig:
    """A backend over a recording module and a device that is late with everything, torch's operators included."""

    def __init__(
        self,
        shape: Shape,
        *,
        windows: tuple[int, ...] = (),
        mixed: MixedKernel = MixedKernel.RAGGED,
        prefill: PrefillKernel = PrefillKernel.FA2,
        sets: int = 2,
        dtype: torch.dtype = torch.float32,
        holistic_waits: bool = True,
        **device: bool,
    ) -> None:
        self.device = LateStream(**device)
        self.module = ShapedFlashInfer(self.device, holistic_waits=holistic_waits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
            self.backend = FlashInferBackend(
                runtime=self.device,
                heads=HeadShape(shape.heads, shape.kv_heads, shape.dim),
                dtype=dtype,
                windows=windows,
                mixed=mixed,
                prefill=prefill,
                kernels=self.module,
                sets=sets,
            )
        #: What BatchAttention is asked before the first batch is no batch's.
        self.module.calls = [call for call in self.module.calls if not call.name.endswith(".plan")]

    def start(self, batch: Ragged, layer: int = 0) -> torch.Tensor:
        """Prepare and run; nothing is computed yet."""
        self.backend.prepare(batch.metadata)
        return self.run(batch, layer)

    def run(self, batch: Ragged, layer: int = 0) -> torch.Tensor:
        with LateOperators(self.device):
            return self.backend.run(batch.q, batch.k_cache, batch.v_cache, layer)

    def planned(self) -> list[str]:
        """The wrapper of each plan, in order."""
        return [call.name.removesuffix(".plan") for call in self.module.calls if call.name.endswith(".plan")]

    def plans(self) -> list[dict[str, object]]:
        return [call.given for call in self.module.calls if call.name.endswith(".plan")]


def reference(batch: Ragged, layer: int = 0, windows: tuple[int, ...] = ()) -> torch.Tensor:
    backend = TorchReferenceBackend(windows=windows)
    backend.prepare(batch.metadata)
    return backend.run(batch.q, batch.k_cache, batch.v_cache, layer)
