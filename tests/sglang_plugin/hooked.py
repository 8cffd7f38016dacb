"""SGLang with hooks, for as long as a block lasts. Needs SGLang."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.plugins.hook_registry import HookRegistry

from telemetry.sglang.hooks import Hooks
from telemetry.sglang.seams import SEAMS
from telemetry.sglang_plugin import install


@contextmanager
def hooked(hooks: Hooks) -> Iterator[Hooks]:
    """Apply the hooks by SGLang's own registry, and take them off again."""
    owners = [(getattr(importlib.import_module(seam.module), seam.owner), seam.name) for seam in SEAMS]
    before = [(owner, name, vars(owner)[name]) for owner, name in owners]
    HookRegistry.reset()
    install(hooks)
    try:
        HookRegistry.apply_hooks()
        yield hooks
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        HookRegistry.reset()
