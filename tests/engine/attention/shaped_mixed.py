"""Wrappers of FlashInfer's shape for batches of pieces and decode rows: BatchAttention and POD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.engine.attention.shaped_plans import OwnPlanMemory, PlanMemory, attend, target_of

if TYPE_CHECKING:
    from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer


class ShapedHolistic:
    """BatchAttention: its plan waits for the device, then writes pinned memory of its own. It knows no windows."""

    name = "BatchAttention"

    def __init__(self, module: ShapedFlashInfer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = module.bind(f"{self.name}.__init__", self, args, kwargs)
        assert given["kv_layout"] == "NHD"
        assert given["device"] == str(module.device.device)
        self._module = module
        self._memory = OwnPlanMemory(module.device)
        self._planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._module.bind(f"{self.name}.plan", self, args, kwargs)
        arrays = [given[name] for name in ("qo_indptr", "kv_indptr", "kv_indices")]
        for array in (*arrays, given["kv_len_arr"]):
            assert array.dtype is torch.int32, "another integer type is another compiled module"
        assert given["kv_data_type"] is given["q_data_type"]
        assert given["head_dim_vo"] == given["head_dim_qk"]
        if (most := self._module.holistic_heads) is not None and given["num_kv_heads"] > most:
            # Its scratch memory is cut up for the worst case in every plan.
            raise RuntimeError("Buffer overflow when allocating memory for holistic_partial_o")
        if self._module.holistic_waits:
            self._module.device.synchronize()
        self._memory.send(arrays, given["kv_len_arr"])
        self._planned = given

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = self._module.bind(f"{self.name}.run", self, args, kwargs)
        q, caches = given["q"], given["kv_cache"]
        planned, read = self._planned, self._memory.reader()
        check_run(planned, q, caches, planned["head_dim_qk"])
        assert given.get("out") is not None, "memory like q's has its strides, which the kernel does not know"
        out = target_of(q, given["out"])
        page_size = planned["page_size"]

        def kernel() -> None:
            *arrays, lens = read()
            arrays.append((lens - 1) % page_size + 1)
            self._module.write(
                "holistic",
                out,
                attend(
                    q,
                    caches,
                    arrays,
                    window=0,
                    causal=planned.get("causal", False),
                    compute_dtype=self._module.compute_dtype,
                ),
            )

        self._module.device.launch(kernel)
        return out, torch.zeros(q.shape[:2])


class ShapedPod:
    """Two plans with pinned memory each, one kernel, two answers in memory of its own."""

    name = "BatchPODWithPagedKVCacheWrapper"

    def __init__(self, module: ShapedFlashInfer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = module.bind(f"{self.name}.__init__", self, args, kwargs)
        assert given["kv_layout"] == "NHD"
        assert given["float_workspace_buffer"].dtype is torch.uint8
        self._module = module
        self._memories = {part: PlanMemory(module.device) for part in "pd"}
        self._planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._module.bind(f"{self.name}.plan", self, args, kwargs)
        assert given["kv_data_type"] is given["q_data_type"], "both types have to be named: the default is float16"
        for part, memory in self._memories.items():
            arrays = [given[f"{name}_{part}"] for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")]
            qo_indptr, kv_indptr, _, last_page_len = arrays
            assert qo_indptr[-1] > 0, "the kernel divides by the number of tiles of each part"
            if part == "d":
                assert bool((qo_indptr.diff() == 1).all()), "rows of this part are not causal"
            memory.send(arrays, (kv_indptr.diff() - 1) * given["page_size"] + last_page_len)
        group = given["num_qo_heads"] // given["num_kv_heads"]
        assert group <= 16, "the kernel's tiles are of 16 rows, the plan's are larger"
        self._planned = given

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = self._module.bind(f"{self.name}.run", self, args, kwargs)
        planned, outs = self._planned, []
        window = planned["window_left"] + 1
        for part, causal in (("p", given.get("causal_p", False)), ("d", True)):
            q, caches = given[f"q_{part}"], given[f"paged_kv_cache_{part}"]
            check_run(planned, q, caches, planned["head_dim"])
            out = target_of(q, None)
            self._start(part, q, caches, out, window=window, causal=causal)
            outs.append(out)
        return outs[0], outs[1]

    def _start(
        self,
        part: str,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        *,
        window: int,
        causal: bool,
    ) -> None:
        read, compute_dtype = self._memories[part].reader(), self._module.compute_dtype

        def kernel() -> None:
            answer = attend(q, caches, read(), window=window, causal=causal, compute_dtype=compute_dtype)
            self._module.write("pod", out, answer)

        self._module.device.launch(kernel)


def check_run(
    planned: dict[str, Any], q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], head_dim: int
) -> None:
    """AssertionError where `run` is given something else than was planned for."""
    k, v = caches
    assert planned, "run() before plan()"
    assert q.dtype is planned["q_data_type"], f"planned for {planned['q_data_type']}, q is {q.dtype}"
    assert q.shape[1:] == (planned["num_qo_heads"], head_dim)
    assert k.shape[1:] == (planned["page_size"], planned["num_kv_heads"], head_dim)
    assert k.stride() == v.stride(), "unequal strides are another compiled module"
