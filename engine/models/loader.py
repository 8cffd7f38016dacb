"""Model loading. Owns: the choice between file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from engine.errors import ModelFormatError
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.ops import MakeOps, TorchOps
from engine.models.quantized import Quantization
from engine.models.weights import LlamaWeights, move

DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_weights(path: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Configuration and canonical weights of a GGUF file or a Hugging Face folder.

    Raises ModelFormatError, naming file, field, value and limit, when it is neither or not supported.
    """
    if path.is_dir():
        from engine.models.hf_loader import load_hf_folder

        return load_hf_folder(path, dtype)
    if path.is_file():
        from engine.models.gguf_loader import load_gguf

        return load_gguf(path, dtype)
    raise ModelFormatError(f"model.path={str(path)!r} does not exist; a GGUF file or a Hugging Face folder is needed")


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    device: torch.device | None = None,
    make_ops: MakeOps = TorchOps,
) -> LlamaModel:
    """A model ready to run on `device`, None: the CPU, but for `reserve_positions`. `make_ops`: see LlamaModel.

    Raises ConfigError where it cannot be quantized here.
    """
    config, weights = load_weights(path, dtype)
    if device is not None:
        move(weights, device)
    return LlamaModel(config, weights, quantization=quantization, make_ops=make_ops)
