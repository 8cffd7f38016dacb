"""The made-up engine about memory and laws: its nodes as a tree, its pool over time, the catalogue with one broken law.

The tree is made by the real book from the toy's nodes; the catalogue is the real one.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np

from invariants.catalog import CATALOG
from telemetry import observe as o

if TYPE_CHECKING:
    from fake_engine import FakeEngine

BROKEN = "INV-PAGE-01"
BUNDLE = "fake-INV-PAGE-01-120"


def _number(name: str) -> int:
    return int(name.partition(":")[2])


def _row(engine: FakeEngine, name: str, *, rank: int | None = None) -> o.TreeRow:
    pages = engine.nodes[name]
    parent = 1 if name == "node:2" else 0
    protected = engine.states[pages[0]] == 2
    above = len(engine.nodes["node:1"]) if parent and "node:1" in engine.nodes else 0
    return o.TreeRow(
        node=_number(name),
        parent=parent,
        depth=2 if parent else 1,
        depth_pages=above + len(pages),
        pages=len(pages),
        pages_below=len(pages) + (len(engine.nodes.get("node:2", ())) if name == "node:1" else 0),
        children=1 if name == "node:1" and "node:2" in engine.nodes else 0,
        state="protected" if protected else "evictable",
        lock_count=3 if protected else 0,
        holders=3 if protected else 0,
        hits=_number(name) % 7,
        last_used_s=1.5 * (_number(name) % 9),
        last_used_step=max(engine.step - 30, 0),
        age_s=60.0,
        goes_out=rank,
    )


def tree(engine: FakeEngine, *, node: int | None, opened: set[int], top: int) -> o.TreeAnswer:
    names = sorted(engine.nodes, key=lambda name: (-len(engine.nodes[name]), name))
    out = [name for name in engine.nodes if engine.states[engine.nodes[name][0]] == 3 and name != "node:1"][:64]
    rows = {name: _row(engine, name, rank=out.index(name) if name in out else None) for name in names}
    roots = [name for name in names if rows[name].parent == 0]
    shown: list[o.TreeRow] = []
    for name in roots[:top]:
        shown.append(rows[name])
        if rows[name].node in opened:
            shown += [row for row in rows.values() if row.parent == rows[name].node]
    rest = roots[top:]
    more = [o.TreeMore(parent=0, nodes=len(rest), pages=sum(rows[name].pages_below for name in rest))] if rest else []
    picked = None
    if node is not None and f"node:{node}" in engine.nodes:
        path = [row for row in rows.values() if row.node == rows[f"node:{node}"].parent] + [rows[f"node:{node}"]]
        lit = np.zeros(engine.num_pages, dtype=bool)
        lit[[page for row in path for page in engine.nodes[f"node:{row.node}"]]] = True
        users = tuple(req.rid for req in engine.running[:3]) if path[-1].holders else ()
        packed = base64.b64encode(np.packbits(lit).tobytes()).decode()
        picked = o.TreePick(node=node, path=tuple(path), holders=users, lit_b64=packed)
    return o.TreeAnswer(
        **engine.head(),
        page_size=16,
        nodes_total=len(names),
        pages_total=sum(map(len, engine.nodes.values())),
        unsure=0,
        rows=tuple(shown),
        more=tuple(more),
        next_out=tuple(rows[name] for name in out[:12]),
        picked=picked,
    )


def page(engine: FakeEngine, number: int) -> o.PageFact | None:
    if not 0 <= number < engine.num_pages:
        return None
    name = engine.owners[number]
    if not name:
        return o.PageFact(**engine.head(), page=number, state="free")
    kind, label = name.split(":", 1)
    is_node = kind == "node"
    holders = tuple(req.rid for req in engine.running[:3]) if engine.states[number] == 2 else ()
    return o.PageFact(
        **engine.head(),
        page=number,
        state=o.PAGE_STATES[engine.states[number]],
        owner=name,
        owner_kind="node" if is_node else "request",
        label=f"node {label}" if is_node else label,
        owner_pages=engine.owners.count(name),
        node=int(label) if is_node else None,
        lock_count=len(holders) if is_node else 1,
        holders=holders if is_node else (label,),
        holders_total=len(holders) if is_node else 1,
        path=(int(label),) if is_node else (),
        age_s=12.5,
        age_steps=250,
    )


def pool(engine: FakeEngine) -> o.PoolAnswer:
    kv = engine.kv()
    points = [
        o.PoolPoint(
            t_wall_s=point.t_wall_s,
            free=max(kv.free - at % 20, 0),
            private=kv.private + at % 20,
            protected=kv.protected,
            evictable=kv.evictable,
            had_tokens=(kv.free + kv.evictable) * 16,
            promised_tokens=500.0 + 40 * (at % 12),
            tightest_tokens=900.0 - 90 * (at % 12),
            evicted_pages=at % 3,
        )
        for at, point in enumerate(engine.points)
    ]
    return o.PoolAnswer(**engine.head(), slot_s=1.0, page_size=16, num_pages=engine.num_pages, points=tuple(points))


def laws(engine: FakeEngine) -> o.LawsAnswer:
    checked = engine.checked
    rows = []
    for law in CATALOG:
        is_broken = checked and law.id in engine.violations
        last = o.LastViolation(step=120, t_wall_s=engine.start, rid=None, expected="1024 in all", found="1025 in all")
        words = {
            name: getattr(law, name) for name in ("id", "sentence", "tier", "cost", "applies", "fails", "properties")
        }
        rows.append(
            o.LawRow(
                **words,
                group=law.group.value,
                mode="record" if checked else "off",
                judged=("each" if law.tier == 1 else "audits" if "audit" in law.cost else "recount")
                if checked
                else "never",
                family_checks=7 * engine.step if checked else 0,
                violations=engine.violations.get(law.id, 0),
                last=last if is_broken else None,
            )
        )
    return o.LawsAnswer(
        **engine.head(),
        is_checked=checked,
        words=f"laws: {len(rows)} record; an audit every 5 s" if checked else "off: no law is judged",
        laws=tuple(rows),
        events_ns=engine.seq * 2_400,
        audits_ns=engine.step * 9_000,
        audits=max(engine.step // 100, 1),
        audit_period_s=5.0,
        uptime_s=engine.now - engine.start,
        bundles={"written": 1, "limited": 0, "full": 0, "failed": 0} if checked else {},
    )


def _bundle_row() -> o.EvidenceRow:
    return o.EvidenceRow(
        id=BUNDLE,
        law=BROKEN,
        step=120,
        at="2026-01-01T00:00:00.000+00:00",
        found_by="event",
        mode="record",
        expected="1024 in all",
        found="1025 in all",
        size_bytes=65_536,
        is_this_run=True,
    )


def evidence(engine: FakeEngine) -> o.EvidenceAnswer:
    rows = (_bundle_row(),) if BROKEN in engine.violations else ()
    why = "" if engine.checked else "off: no law is judged"
    return o.EvidenceAnswer(**engine.head(), rows=rows, total=len(rows), is_kept=engine.checked, why=why)


def bundle(engine: FakeEngine, name: str) -> o.EvidenceDetail | None:
    if name != BUNDLE or BROKEN not in engine.violations:
        return None
    records = [
        o.EvidenceRecord(
            seq=seq,
            step=118 + (seq - 500) // 10,
            before_ms=float(529 - seq),
            type=("PagesMoved", "LockChanged", "StepCompleted")[seq % 3],
            text=f"pages={seq} cause=claim",
            is_evidence=seq == 529,
            is_offending=seq == 529,
        )
        for seq in range(500, 530)
    ]
    return o.EvidenceDetail(
        **engine.head(),
        row=_bundle_row(),
        sentence="The four page counts sum to the pool.",
        version="0.1.0",
        model="toy",
        records=tuple(records),
        records_total=2_000,
        differences=(
            o.StateRow(law=BROKEN, expected="1024 in all", found="1025 in all"),
            o.StateRow(law="", expected="600 free pages, counted", found="601, by the engine's counter"),
        ),
        taken="between two steps",
        commands=(("judge the record again", "admitscope check journals/fake.jsonl"),),
    )
