"""FlashInfer's signatures as data. Owns: reading them from the package, the stored file, and binding calls to either.

Run as a program in an environment that has flashinfer, it writes the file:
`.venv-flashinfer/bin/python -m tests.flashinfer.signatures`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

STORED = Path(__file__).resolve().parents[1] / "data" / "flashinfer-signatures.json"
#: What engine/attention/flashinfer.py, engine/models/flashinfer_ops.py and bench/gpu_check call: methods by class, and
#: functions, which have none.
CALLS: dict[str, tuple[str, ...]] = {
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
    "BatchAttention": ("__init__", "plan", "run"),
    "BatchPODWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
    "rmsnorm": (),
    "fused_add_rmsnorm": (),
    "apply_rope_with_cos_sin_cache_inplace": (),
    "silu_and_mul": (),
}

#: [name, kind, default as text or None where it has none]
Parameter = list[str | None]


def described() -> dict[str, Any]:
    """The installed package: its version and each call's parameters."""
    # Imported, it writes a cache and a log; not into anybody's home.
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp())
    package = importlib.import_module("flashinfer")
    calls = {call: _parameters(package, *call.split(".")) for call in names()}
    return {"version": package.__version__, "calls": calls}


def names() -> list[str]:
    """Every call: `Class.method` or `function`."""
    return [name for owner, methods in CALLS.items() for name in ([f"{owner}.{m}" for m in methods] or [owner])]


def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(STORED.read_text("utf-8"))
    return content


def signature(parameters: list[Parameter]) -> inspect.Signature:
    """A signature to `bind` calls to; a default is its text."""
    return inspect.Signature(
        [
            inspect.Parameter(
                str(name),
                getattr(inspect.Parameter, str(kind)),
                default=inspect.Parameter.empty if default is None else default,
            )
            for name, kind, default in parameters
        ]
    )


def changes(old: list[Parameter], new: list[Parameter]) -> list[str]:
    """What of `new` a call made for `old` may stumble over: empty where parameters were only added, with defaults."""
    now = {name: (kind, default) for name, kind, default in new}
    found = []
    for name, kind, default in old:
        if name not in now:
            found.append(f"{name} is gone")
        elif now[name] != (kind, default):
            found.append(f"{name} was {kind} {default}, is {now[name][0]} {now[name][1]}")
    known = {name for name, _, _ in old}
    found += [
        f"{name} has no default"
        for name, kind, default in new
        if name not in known and default is None and "VAR" not in str(kind)
    ]
    if not found:
        places = [name for name, _, _ in new if name in known]
        found += [
            f"the order of {name} is another" for (name, _, _), there in zip(old, places, strict=True) if name != there
        ][:1]
    return found


def _parameters(package: ModuleType, name: str, method: str = "") -> list[Parameter]:
    owner = getattr(package, name)
    found = inspect.signature(getattr(owner, method) if method else owner)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.parameters.values()) and method == "plan":
        # It takes everything, to say which positional arguments are going out of use, and hands it on to this.
        found = inspect.signature(owner._plan_impl)
    return [
        [p.name, p.kind.name, None if p.default is inspect.Parameter.empty else repr(p.default)]
        for p in found.parameters.values()
    ]


if __name__ == "__main__":
    found = described()
    lines = (f'  "{name}": {json.dumps(parameters)}' for name, parameters in found["calls"].items())
    text = f'{{\n "version": "{found["version"]}",\n "calls": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    STORED.write_text(text, encoding="utf-8")
    print(f"{STORED.name}: {stored()['version']}")
