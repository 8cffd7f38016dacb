"""Search space. Owns: which settings a search varies, and the values of each, in an order that neighbours share.

Without `--vary` it is chunk size, both budgets, policy, conservativeness of the new-token ratio, and mixed steps. Sizes
are steps of two around the baseline's. Where the cost model was fitted to measurements, sizes that were never measured
are left out: their times would be guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.config import EngineConfig, Policy
from telemetry.settings import UsageError
from telemetry.sim.overrides import changed, full_name, is_setting

#: Orders that ask for nothing but the queue. `random` is none that anybody would choose; the others need what clients
#: must send.
_POLICIES: Final = (Policy.FCFS, Policy.LPM, Policy.DFS_WEIGHT, Policy.HRRN, Policy.SHORTEST_PREFILL_FIRST)
_CONSERVATIVENESS: Final = (0.3, 0.5, 0.7, 1.0, 1.4)
_CHUNK: Final = "scheduler.chunked_prefill_size"
_INPUT: Final = "scheduler.max_prefill_tokens"
_ROWS: Final = "scheduler.max_running_requests"
_POLICY: Final = "scheduler.schedule_policy"
_RATIO: Final = "scheduler.schedule_conservativeness"
_MIXED: Final = "scheduler.enable_mixed_chunk"
USUAL: Final = (_CHUNK, _INPUT, _ROWS, _POLICY, _RATIO, _MIXED)
_DOWN, _UP = 3, 3
_MOST_VALUES: Final = 64
#: Of the cost model's shape: what each size bounds.
_MEASURED_BY: Final = {_CHUNK: "prefill_tokens", _ROWS: "decode_rows"}


@dataclass(frozen=True, slots=True)
class Dimension:
    """One setting. `values` as `--set` takes them; `base` is the place of the baseline's own.

    is_ordered  whether neighbours in `values` are alike
    """

    name: str
    values: tuple[str, ...]
    base: int
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched. `notes` says what was left out, and why."""

    dimensions: tuple[Dimension, ...]
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many configurations there are."""
        found = 1
        for dimension in self.dimensions:
            found *= len(dimension.values)
        return found


def space_of(vary: Sequence[str], config: EngineConfig, measured: Mapping[str, float]) -> Space:
    """The space around `config`. `measured`: the largest of each feature in the fit; empty when nothing was fitted.

    Raises UsageError for a setting or value that does not exist, or when nothing is left to vary.
    """
    notes: list[str] = []
    asked = [_asked(word) for word in _rejoined(vary)] or [(name, ()) for name in USUAL]
    twice = next((name for i, (name, _) in enumerate(asked) if name in {n for n, _ in asked[:i]}), None)
    if twice is not None:
        raise UsageError(f"--vary {twice} is given twice")
    dimensions = []
    for name, values in asked:
        found = _given(name, values, config) if values else _usual(name, config, measured, notes)
        if len(found.values) > 1:
            dimensions.append(found)
        elif vary:
            raise UsageError(f"--vary {name}: {found.values[0]} is the only value there is to try")
    if not dimensions:
        raise UsageError("--vary: nothing is left to vary")
    return Space(tuple(dimensions), tuple(notes))


def _rejoined(words: Sequence[str]) -> list[str]:
    """`name=A,B` comes as two words, as the command line parts all lists: what is no setting is one more value."""
    found: list[str] = []
    for word in words:
        is_value = "=" not in word and found and "=" in found[-1]
        if is_value and not is_setting(word):
            found[-1] = f"{found[-1]},{word}"
        else:
            found.append(word)
    return found


def _asked(word: str) -> tuple[str, tuple[str, ...]]:
    name, equals, text = word.partition("=")
    try:
        name = full_name(name.strip().removeprefix("--"))
    except UsageError as error:
        raise UsageError(str(error).replace("--set", "--vary", 1)) from error
    values = tuple(dict.fromkeys(value.strip().lower() for value in text.split(",") if value.strip()))
    if equals and not values:
        raise UsageError(f"--vary {word}: names no value; as in {name.partition('.')[2]}=64,128,256")
    if len(values) > _MOST_VALUES:
        raise UsageError(f"--vary {name}: {len(values)} values; at most {_MOST_VALUES} can be tried")
    return name, values


def _given(name: str, values: tuple[str, ...], config: EngineConfig) -> Dimension:
    if name == "cache.memory_mib":
        raise UsageError(f"--vary {name}: has no effect while cache.num_pages is set: vary cache.num_pages")
    base = {"scheduler": config.scheduler.model_dump(mode="json"), "cache": config.cache.model_dump(mode="json")}
    try:
        # As the engine writes them: 1.0 and 1 are one value.
        texts = list(dict.fromkeys(_own(changed(base, {name: value}), name) for value in values))
    except UsageError as error:
        raise UsageError(str(error).replace("--set", "--vary", 1)) from error
    numbers = all(text.replace(".", "", 1).isdigit() for text in texts)
    return _with_base(name, sorted(texts, key=float) if numbers else texts, config, is_ordered=numbers)


def _usual(name: str, config: EngineConfig, measured: Mapping[str, float], notes: list[str]) -> Dimension:
    scheduler = config.scheduler
    if name in {_CHUNK, _INPUT, _ROWS}:
        is_rows = name == _ROWS
        was = {_CHUNK: scheduler.chunked_prefill_size, _INPUT: scheduler.max_prefill_tokens}.get(name)
        base = scheduler.max_running_requests if is_rows else was or scheduler.max_prefill_tokens
        sizes = _ladder(base, 1 if is_rows else config.cache.page_size)
        most = measured.get(_MEASURED_BY.get(name, ""), float("inf"))
        if any(size > max(most, base) for size in sizes):
            notes.append(
                f"{name} above {max(most, base):,.0f} is not searched: no such step was measured, so its time would "
                "be a guess"
            )
            sizes = [size for size in sizes if size <= max(most, base)]
        return _with_base(name, list(map(str, sizes)), config, is_ordered=True)
    if name == _POLICY:
        return _with_base(name, [policy.value for policy in _POLICIES], config, is_ordered=False)
    if name == _RATIO:
        values = sorted({*_CONSERVATIVENESS, scheduler.schedule_conservativeness})
        return _with_base(name, [f"{value:g}" for value in values], config, is_ordered=True)
    if name == _MIXED:
        return _with_base(name, ["false", "true"], config, is_ordered=False)
    raise UsageError(f"--vary {name}: name its values, as in --vary {name}=A,B; only {', '.join(USUAL)} have their own")


def _ladder(base: int, unit: int) -> list[int]:
    """Steps of two around `base`, in multiples of `unit`, and `base` itself."""
    steps = (base * 2**up // 2**_DOWN for up in range(_DOWN + _UP + 1))
    return sorted({base, *(max(step // unit * unit, unit) for step in steps)})


def _with_base(name: str, values: list[str], config: EngineConfig, *, is_ordered: bool) -> Dimension:
    """With the baseline's own value among them: at the end when it is none of those named."""
    text = _own(config, name)
    if text not in values:
        values = [*values, text]
        if is_ordered and text != "none":
            values.sort(key=lambda value: float("inf") if value == "none" else float(value))
    return Dimension(name, tuple(values), values.index(text), is_ordered)


def _own(config: EngineConfig, name: str) -> str:
    """A setting's value in `config`, as `--set` takes it."""
    section, _, field = name.partition(".")
    own = getattr(getattr(config, section), field)
    return f"{own:g}" if isinstance(own, float) else str(getattr(own, "value", own)).lower()
