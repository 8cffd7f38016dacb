"""JSON beside weights. Owns: reading one small JSON object of a model folder, as data that nobody vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from engine.errors import ModelFormatError

#: Far above every configuration and index in use; what is larger is not one.
_MAX_BYTES: Final = 64 * 1024 * 1024


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelFormatError for anything else, NaN and infinities included."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelFormatError(f"{path}: has {size} bytes; at most {_MAX_BYTES} are read")
        data = path.read_bytes()
        value = json.loads(data, parse_constant=_no_constant)
        if b"\\u" in data:  # escapes can spell half a character, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ModelFormatError(f"{path}: cannot be read as JSON: nested too deep") from None
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: holds a {type(value).__name__}; an object is needed")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
