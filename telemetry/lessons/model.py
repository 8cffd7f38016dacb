"""The lesson file. Owns: every field that a teacher may write, its limits, and the texts in two languages.

Strict: an unknown field, a value of another type or beyond a limit is refused with the field, the value and the limit.
What the engine itself refuses (a chunk below a page) is refused in the engine's words.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, Policy, SchedulerConfig
from telemetry.lessons.moment import Text

MAX_REQUESTS: Final = 64
MAX_STEPS: Final = 400
MAX_POOL_TOKENS: Final = 65_536
MAX_PAGES: Final = 4_096

Name = Annotated[str, Field(min_length=1, max_length=24, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Tokens = Annotated[int, Field(ge=1, le=16_384)]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        populate_by_name=True,
    )


class Words(_Part):
    """One text. A language that is missing is read in the other one."""

    en: str | None = Field(None, min_length=1, max_length=2_000)
    """English."""
    zh: str | None = Field(None, min_length=1, max_length=2_000, alias="zh-CN")
    """Chinese, written `zh-CN`."""

    @model_validator(mode="after")
    def _is_said(self) -> Self:
        if self.en is None and self.zh is None:
            raise ValueError("a text needs `en`, `zh-CN`, or both")
        return self

    @property
    def text(self) -> Text:
        return Text(self.en or self.zh or "", self.zh or self.en or "")


class Engine(_Part):
    """The scheduler and cache of the lesson. Names and limits are those of `admitscope serve`."""

    page_size: int = Field(16, ge=1, le=1024)
    """Tokens per K/V page."""
    pool_tokens: int = Field(1_024, ge=2, le=MAX_POOL_TOKENS)
    """Size of the K/V pool, in tokens; whole pages of it are used."""
    max_prefill_tokens: int = Field(8_192, ge=1)
    """The input ledger of a step."""
    chunked_prefill_size: int | Literal["off"] = Field("off")
    """The chunk ledger of a step; "off" turns chunking off."""
    schedule_policy: str = "fcfs"
    """Order of the waiting queue."""
    enable_mixed_chunk: bool = True
    """May decode rows ride in a prefill step."""
    max_running_requests: int = Field(64, ge=1, le=256)
    """Requests that may hold K/V memory at once."""
    prefill_max_requests: int | Literal["off"] = "off"
    """Requests one prefill batch may hold."""
    schedule_conservativeness: float = Field(1.0, gt=0, le=100)
    """Scales the new-token ratio: it starts at 0.7 x this, at most 1."""
    clip_max_new_tokens: int = Field(4_096, ge=1)
    """Cap of one request's promised output."""
    kv_accounting: Literal["reference", "exact"] = "reference"
    """How K/V memory is priced."""
    enable_radix: bool = True
    """Share prefixes through the radix tree."""
    max_overtakes: int | Literal["off"] = "off"
    """A request that so many admitting passes went by comes before every policy."""
    starvation_limit_s: float | Literal["off"] = "off"
    """A request that waited this long comes before every policy."""
    enable_priority_scheduling: bool = False
    """Serve more important requests first."""
    enable_priority_preemption: bool = False
    """May a waiting request push back running ones that are less important."""

    @property
    def pages(self) -> int:
        return self.pool_tokens // self.page_size

    def config(self) -> EngineConfig:
        """The engine's own configuration. Raises ValueError (pydantic) for what the engine would refuse."""
        if not 2 <= self.pages <= MAX_PAGES:
            raise ValueError(
                f"engine.pool_tokens={self.pool_tokens} with engine.page_size={self.page_size} is {self.pages} pages; "
                f"2 to {MAX_PAGES} are possible"
            )
        own = {name for name in SchedulerConfig.model_fields if name in type(self).model_fields}
        values = {name: getattr(self, name) for name in own}
        return EngineConfig(
            scheduler=SchedulerConfig.model_validate(
                {name: None if value == "off" else value for name, value in values.items()}
            ),
            cache=CacheConfig(page_size=self.page_size, num_pages=self.pages, enable_radix=self.enable_radix),
            executor=ExecutorConfig(kind="simulated"),
        )


class Prefix(_Part):
    """A shared beginning of prompts."""

    name: Name
    """How requests and pages refer to it."""
    tokens: Tokens
    """Its length."""
    cached: bool = False
    """In the tree before step 1, held by nobody; older ones first in the file."""


class LessonRequest(_Part):
    """One request."""

    rid: Name
    """Its name."""
    prompt: Tokens
    """Prompt tokens, the shared prefix included."""
    max_new: Tokens
    """Output tokens that it may ask for, and that are promised to it."""
    prefix: Name | None = None
    """The shared prefix that its prompt begins with."""
    arrives: int = Field(1, ge=1, le=MAX_STEPS)
    """The step before which it comes."""
    outputs: Tokens | None = None
    """Output tokens after which it ends by itself. Unset: `max_new`."""
    already: int = Field(0, ge=0, le=4_096)
    """Output tokens that it has when the lesson begins: it runs already, and does not wait."""
    priority: int | None = None
    """Its importance, with `enable_priority_scheduling`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        ends = self.max_new if self.outputs is None else self.outputs
        if ends > self.max_new:
            raise ValueError(f"outputs is {self.outputs}; it may be at most max_new={self.max_new}")
        if self.already >= ends:
            raise ValueError(f"already is {self.already}; it must be below the {ends} outputs at which {self.rid} ends")
        if self.already and self.arrives != 1:
            raise ValueError(f"already={self.already} and arrives={self.arrives}: who runs already came before step 1")
        return self


class Parameter(_Part):
    """A setting that may be changed, and the values to try."""

    name: str
    """A field of [engine]."""
    values: tuple[int | float | bool | str, ...] = Field(min_length=1, max_length=12)
    """What it may be set to, beside the lesson's own value."""
    look_for: Words | None = None
    """What to watch when it changes."""

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, data: object) -> object:
        # TOML has arrays only; strict parsing wants the tuple.
        if isinstance(data, dict) and isinstance(data.get("values"), list):
            return data | {"values": tuple(data["values"])}
        return data


class Note(_Part):
    """What the teacher says at a moment: the first one that fits."""

    step: int = Field(ge=1, le=MAX_STEPS)
    """The step of the lesson."""
    kind: str | None = None
    """The kind of moment. Unset: any."""
    rid: str | None = None
    """The request it is about. Unset: any."""
    say: Words
    """The text."""


class Lesson(_Part):
    """A lesson file."""

    id: Name
    """Its address."""
    place: int = Field(1_000, ge=1, le=1_000_000)
    """Where it stands in the list; smaller first."""
    title: Words
    """Its name."""
    about: Words
    """What it shows."""
    steps: int = Field(20, ge=1, le=MAX_STEPS)
    """Steps after which it ends, if work is left."""
    step_ms: float = Field(100.0, gt=0, le=60_000)
    """Length of a step, for `starvation_limit_s`."""
    engine: Engine = Engine()
    """Settings."""
    prefix: tuple[Prefix, ...] = Field((), max_length=16)
    """Shared beginnings."""
    request: tuple[LessonRequest, ...] = Field(min_length=1, max_length=MAX_REQUESTS)
    """Requests, in the order in which they come."""
    parameter: tuple[Parameter, ...] = Field((), max_length=12)
    """What may be changed."""
    note: tuple[Note, ...] = Field((), max_length=64)
    """Texts at moments."""

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {
            key: tuple(value)
            if key in {"prefix", "request", "parameter", "note"} and isinstance(value, list)
            else value
            for key, value in data.items()
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        prefixes = {prefix.name: prefix for prefix in self.prefix}
        names = [each.rid for each in self.request] + list(prefixes)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"the name {name!r} is given to {names.count(name)} requests or prefixes; one may have it"
                )
        if len(prefixes) < len(self.prefix):
            raise ValueError("two prefixes have the same name")
        for each in self.request:
            if each.prefix is not None and each.prefix not in prefixes:
                raise ValueError(f"request {each.rid}: prefix {each.prefix!r} is not among {sorted(prefixes)}")
            if each.prefix is not None and prefixes[each.prefix].tokens > each.prompt:
                raise ValueError(
                    f"request {each.rid}: prompt is {each.prompt}; its prefix {each.prefix!r} alone has "
                    f"{prefixes[each.prefix].tokens} tokens"
                )
        for parameter in self.parameter:
            if parameter.name not in Engine.model_fields:
                raise ValueError(f"parameter {parameter.name!r} is no field of [engine]: {sorted(Engine.model_fields)}")
        if self.engine.schedule_policy not in set(Policy):
            raise ValueError(
                f"engine.schedule_policy is {self.engine.schedule_policy!r}; one of {[each.value for each in Policy]}"
            )
        return self
