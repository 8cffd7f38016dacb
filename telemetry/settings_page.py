"""The commands that open the page. Owns: the flags of `dashboard` and `demo`, and what every subcommand has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import CliPositionalArg

from invariants.modes import OnViolation


class SubCommand(BaseModel):
    """Base of every subcommand but `serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


_URL: Final = r"^https?://[^/\s]+(/\S*)?$"
_Url = Annotated[str, Field(pattern=_URL)]


def _is_url(text: str) -> bool:
    return re.match(_URL, text) is not None


class DashboardCommand(SubCommand):
    """Open the page of running engines, or of recorded runs, in a browser.

    examples:
      admitscope dashboard                                the engine on 127.0.0.1:8000
      admitscope dashboard http://10.0.0.5:8000 --port 8600
      admitscope dashboard http://10.0.0.5:8000 --url http://10.0.0.6:8000
      admitscope dashboard --trace-url http://localhost:16686/trace/{trace_id}
      admitscope dashboard runs/admitscope-20261130T094500.000000Z.jsonl
    """

    address: CliPositionalArg[str | None] = None
    """Where the engine listens: http://… or https://…, with or without /v1; or a journal, as --journal takes it.
    127.0.0.1:8000 when nothing else is to be shown."""
    url: list[_Url] = Field(default_factory=list)
    """Another engine beside it; may be given several times."""
    journal: list[Path] = Field(default_factory=list)
    """A journal, the folder of one, or a folder of Parquet tables, to be looked at step by step; may be given several
    times."""
    ttft_ms: float | None = Field(None, gt=0, le=86_400_000)
    """Objective for the time to first token; none: as the engine says."""
    tbt_ms: float | None = Field(None, gt=0, le=86_400_000)
    """Objective for the time between tokens; none: as the engine says."""
    host: str = "127.0.0.1"
    """Address that the page listens on."""
    allow_host: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9.:*-]{1,253}$")]] = Field(default_factory=list)
    """Another name that browsers may call the page by, such as that of a proxy; may be given several times."""
    trace_url: Annotated[str, Field(pattern=r"^https?://[^\s{}]+\{trace_id\}[^\s{}]*$")] | None = None
    """Where a trace is shown: an address with {trace_id} in it. A request's trace is then a link."""
    port: int = Field(8501, ge=0, le=65535)
    """Port of the page; 0 picks a free one."""
    pick_port: bool = False
    """When the port is taken, take a free one and say so."""

    lessons: Path | None = None
    """Folder of lesson files for the classroom, beside the built-in ones; docs/teaching.md says how to write one."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> DashboardCommand:
        if self.address is not None and not _is_url(self.address) and not Path(self.address).exists():
            raise ValueError(
                f"{self.address!r} is neither an engine's address (http://… or https://…) nor a journal on this machine"
            )
        return self

    def urls(self) -> list[str]:
        """Every engine, in the order given."""
        given = [*([self.address] if self.address and _is_url(self.address) else []), *self.url]
        return given or ([] if self.journals() else ["http://127.0.0.1:8000"])

    def journals(self) -> list[Path]:
        """Every recorded run, in the order given."""
        first = [Path(self.address)] if self.address and not _is_url(self.address) else []
        return [*first, *self.journal]


class DemoCommand(SubCommand):
    """A real model under a replayed trace, live in the browser: server, dashboard and load, started and ended together.

    Rows of the Azure conversation trace arrive as chat questions about passages of Shakespeare, in waves, a
    little faster at times than this machine can answer: a queue forms and empties. Nothing is downloaded.
    Environment names of `serve` reach the demo's server, where it does not set the same thing itself.

    examples:
      admitscope demo                                     until Ctrl-C
      admitscope demo --duration 60                       unattended: a minute of arrivals, then a summary
    """

    duration: float = Field(0.0, ge=0, le=86_400)
    """Seconds of arrivals; then everything accepted is finished. 0: until Ctrl-C."""
    rate: float | None = Field(None, gt=0, le=1000)
    """Arrivals per second. Unset: measured on this machine at the start."""
    api_port: int = Field(8000, ge=0, le=65535)
    """Port of the API and of /metrics; another one is taken, and named, when it is in use."""
    dashboard_port: int = Field(8501, ge=0, le=65535)
    """Port of the dashboard; likewise."""
    dashboard: bool = True
    """Start the dashboard."""
    on_violation: OnViolation | None = None
    """As for `serve`. Unset: ADMITSCOPE_ON_VIOLATION, or `raise`; a broken law fails the demo in either case."""
    journal: Path | None = Path("journals")
    """Folder that the run's journal is written to, for `explain` and `replay`. `none` writes nothing."""
    seed: int = Field(0, ge=0)
    """Of arrivals and questions."""
