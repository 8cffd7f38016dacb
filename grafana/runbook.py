"""The page of alerts. Owns: docs/alerts.md, one section per rule, generated from the rules.

python -m grafana.runbook
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from grafana.rules import ALERTS, REAL_TIME, RECORDINGS

#: Alerts of which docs/debugging.md makes one, finds its cause and cures it: the headings there.
WALKS: Final = {
    "AdmitscopeStarvation": "Starvation behind a long prompt",
    "AdmitscopeRetractStorm": "A storm of retractions",
    "AdmitscopeReservationTooLarge": "Over-reservation: the queue waits beside free pages",
    "AdmitscopeTTFTSLOBurn": "A chunk that is too small",
    "AdmitscopeLateTokens": "A chunk that is too large",
}
PAGE: Final = Path(__file__).parents[1] / "docs" / "alerts.md"
_HEAD: Final = """# Alerts

Generated from `grafana/rules.py` by `python -m grafana.runbook`. Do not edit.

`grafana/rules/admitscope.yml` holds these rules for Prometheus, `grafana/alertmanager.yml` a route for them: what is
`page` wakes somebody at once, what is `ticket` can wait. `make monitor` runs both against the demo; `make
verify-monitoring` fires every page in a real Prometheus and sees it arrive behind Alertmanager.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for alert in ALERTS:
        held = f" for {REAL_TIME.window(alert.hold_s)}" if alert.hold_s else ""
        parts.append(
            f"## {alert.name}\n\n**{alert.meaning}** ({alert.severity}{held})\n\nLook at: {alert.look}\n\n"
            f"{_walk(alert.name)}```promql\n{alert.expr(REAL_TIME)}\n```\n"
        )
    windows = "\n".join(f"- `{rule.name}`: share of `{rule.histogram}` above {rule.bound:g} s" for rule in RECORDINGS)
    parts.append(f"## Recorded ratios\n\nWhat the burn alerts read:\n\n{windows}\n")
    return "\n".join(parts)


def _walk(name: str) -> str:
    """A line that links the incident of this alert, where there is one."""
    heading = WALKS.get(name)
    if heading is None:
        return ""
    anchor = heading.lower().replace(":", "").replace(" ", "-")
    return f"One of these, step by step: [{heading}](debugging.md#{anchor}).\n\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
