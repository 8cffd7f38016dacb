"""GgufFile. Owns: reading the header of a GGUF file, with every length checked against the file before it is used.

Layout (GGUF 2 and 3, little-endian): magic, version, tensor count, key count · key-value pairs · tensor descriptions ·
padding to `general.alignment` · tensor data. Dequantisation is left to the `gguf` package.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFormatError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_MAX_DIMENSIONS: Final = 4
_MAX_KEYS: Final = 65_536
_MAX_TENSORS: Final = 1 << 20
_MAX_NESTING: Final = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` slowest dimension first (rows, columns), `kind` its GGML type number, place in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` (key -> value), `tensors` (name -> TensorInfo). A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFormatError(f"{path}: cannot be read as a GGUF file: {error}") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:  # an interrupt too must not leave the file mapped
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays made by `dequantize` are copies and stay valid."""
        self._map.close()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Metadata `key`, which must be a `kind`; raises ModelFormatError when absent without a default."""
        if key not in self.metadata:
            if default is ...:
                raise ModelFormatError(f"{self.path}: metadata key {key} is missing")
            return default
        value = self.metadata[key]
        # A bool is an int to Python, never a count to us.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ModelFormatError(f"{self.path}: metadata key {key} is {value!r:.60}; a {_names(kind)} is needed")
        return value

    def dequantize(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Tensor `name` as float32 of `shape`; raises ModelFormatError when absent, of another shape or type."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.path}: tensor {name} is missing")
        if info.shape != shape:
            raise ModelFormatError(f"{self.path}: tensor {name} has shape {info.shape}; {shape} is needed")
        raw = np.frombuffer(self._map[info.start : info.start + info.num_bytes], dtype=np.uint8)
        kind = GGMLQuantizationType(info.kind)
        if kind is GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(shape).astype(np.float32)
        if kind is GGMLQuantizationType.F16:
            return raw.view("<f2").reshape(shape).astype(np.float32)
        try:
            values = dequantize(raw.reshape(*shape[:-1], -1), kind)
        except NotImplementedError as error:  # how the gguf package says that it cannot
            raise ModelFormatError(f"{self.path}: tensor {name} has type {kind.name}: not supported") from error
        return np.ascontiguousarray(values.reshape(shape), dtype=np.float32)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic = self._take(4, "magic")
        if magic != _MAGIC:
            raise ModelFormatError(f"{self.path}: starts with {magic!r}; a GGUF file starts with {_MAGIC!r}")
        version = self._scalar("<I", "version")
        if version not in _VERSIONS:
            raise ModelFormatError(f"{self.path}: GGUF version is {version}; 2 and 3 (little-endian) are supported")
        num_tensors = self._count("tensor count", _MAX_TENSORS)
        num_keys = self._count("key count", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("metadata key")
            metadata[key] = self._value(self._scalar("<I", f"type of {key}"), key, nesting=0)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelFormatError(f"{self.path}: general.alignment is {alignment!r}; a power of two is needed")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise ModelFormatError(f"{self.path}: tensor {name} is described twice")
            num_bytes = _num_bytes(self.path, name, shape, kind)
            start = base + offset
            if start + num_bytes > len(self._map):
                raise ModelFormatError(
                    f"{self.path}: tensor {name} ends at byte {start + num_bytes}; the file has {len(self._map)} bytes"
                )
            tensors[name] = TensorInfo(name, shape, kind, start, num_bytes)
        self._check_apart(tensors)
        return metadata, tensors

    def _check_apart(self, tensors: dict[str, TensorInfo]) -> None:
        """Tensors that share bytes were not written by a converter: one of them is not what it says."""
        placed = sorted(tensors.values(), key=lambda info: (info.start, info.num_bytes))
        for before, after in itertools.pairwise(placed):
            if after.start < before.start + before.num_bytes:
                raise ModelFormatError(f"{self.path}: tensors {before.name} and {after.name} share bytes")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("tensor name")
        dimensions = self._scalar("<I", f"dimensions of {name}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelFormatError(f"{self.path}: tensor {name} has {dimensions} dimensions; 1 to 4 are allowed")
        # Stored fastest dimension first.
        shape = tuple(self._scalar("<Q", f"shape of {name}") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("<I", f"type of {name}"), self._scalar("<Q", f"offset of {name}")

    def _value(self, kind: int, key: str, *, nesting: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise ModelFormatError(f"{self.path}: metadata key {key} has type {kind}; 0 to 12 are known")
        if nesting >= _MAX_NESTING:
            raise ModelFormatError(f"{self.path}: metadata key {key} nests arrays deeper than {_MAX_NESTING}")
        item = self._scalar("<I", key)
        # Every element takes at least one byte: a longer count is a lie, and looping over it would not end.
        count = self._count(f"length of {key}", len(self._map) - self._at - 8)
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self._take(count * struct.calcsize(code), key)
            return [value for (value,) in struct.iter_unpack(code, raw)]
        return [self._value(item, key, nesting=nesting + 1) for _ in range(count)]

    def _string(self, what: str) -> str:
        length = self._count(f"length of {what}", len(self._map) - self._at - 8)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def _count(self, what: str, limit: int) -> int:
        count: int = self._scalar("<Q", what)
        if count > limit:
            raise ModelFormatError(f"{self.path}: {what} is {count}; at most {limit} is possible here")
        return count

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > len(self._map):
            raise ModelFormatError(
                f"{self.path}: {what} needs bytes {self._at} to {end}; the file has {len(self._map)} bytes"
            )
        taken = self._map[self._at : end]
        self._at = end
        return taken


def _num_bytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Size of a tensor's data in the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise ModelFormatError(f"{path}: tensor {name} has GGML type {kind}, which is not known") from error
    if shape[-1] % block:
        raise ModelFormatError(
            f"{path}: tensor {name} has rows of {shape[-1]} elements; its type needs a multiple of {block}"
        )
    elements = 1
    for size in shape:
        elements *= size
    return elements // block * block_bytes


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
