"""Lives of every kind, made up from a seed: each alternative of a sentence is said sooner or later.

They need not be possible, only well-formed: what is tested with them is words.
"""

from __future__ import annotations

import random
from typing import Any, Final

from engine.config import Policy
from engine.request import Cause, RequestState
from engine.scheduler.decision import Reason
from engine.scheduler.plan import StepKind
from telemetry.blockers import OF_REASON
from telemetry.life_facts import (
    ChunkFact,
    EndFact,
    GapFact,
    HeldShare,
    Life,
    NoPass,
    NotReached,
    Refusals,
    ResponseFact,
    RetractionFact,
    SliceShare,
    Wait,
)
from telemetry.live_explain_now import SliceGiven
from telemetry.observe import (
    BLOCKERS,
    TTFT_PARTS,
    DecisionRow,
    EndedBy,
    Ledgers,
    Overtaker,
    QueueEntry,
    RequestDetail,
    RequestRow,
    Stopper,
    Timeline,
    WaitSpan,
)
from telemetry.schema_parts import LedgerPart

MS: Final = 1_000_000
OVERDRAFTS: Final = ("first_unchunked", "input_by_chunk", "chunk_page_rounding", "kv_rounding", "continuation")
KEYS: Final = ("cached_tokens", "uncached_tokens", "max_new_tokens", "priority", "")


class Maker:
    """One seed's lives."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def maybe(self, value: Any, otherwise: Any = None) -> Any:
        return value if self.dice.random() < 0.5 else otherwise

    def count(self, most: int = 3000) -> int:
        return self.dice.choice((1, 2, self.dice.randint(1, most)))

    def rid(self) -> str:
        return f"r{self.dice.randint(0, 99)}"

    def reason(self) -> Reason:
        return self.dice.choice(list(Reason))

    def refusals(self) -> Refusals:
        need = self.maybe(self.dice.choice((1.0, 2.0, 107.25, 4096.0)))
        first = self.count()
        last = first + self.dice.choice((0, 5))
        have = self.dice.choice((0.0, 90.5))
        return Refusals(
            reason=self.reason(), count=self.count(), first_step=first, last_step=last, need=need, have=have
        )

    # -- as recorded -----------------------------------------------------------------------------------------------

    def wait(self) -> Wait:
        dice, step = self.dice, self.count()
        skips = dice.choice((0, 0, 1, 14))
        return Wait(
            from_ns=3 * MS,
            to_ns=3 * MS + dice.choice((0, 400, 7 * MS, 3_000 * MS)),
            from_step=step,
            to_step=step + dice.choice((0, 1, 40)),
            after=dice.choice((Cause.ARRIVE, Cause.ARRIVE, Cause.RETRACT, Cause.PREEMPT)),
            ahead=dice.choice((0, 1, 7, 2500)),
            running=self.count(),
            passes=dice.choice((0, 1, 1, 9)),
            refusals=tuple(self.refusals() for _ in range(dice.choice((0, 0, 2)))),
            not_reached=tuple(
                NotReached(
                    reason=dice.choice((Reason.QUEUE_END, Reason.CHUNK_EXHAUSTED)),
                    rid=self.maybe(self.rid()),
                    count=self.count(),
                    first_step=7,
                    last_step=9,
                )
                for _ in range(dice.choice((0, 0, 1, 16)))
            ),
            no_pass=tuple(
                NoPass(
                    reason=Reason.FULL_FLAG_SET,
                    count=self.count(),
                    first_step=7,
                    last_step=dice.choice((7, 30)),
                    set_by=by,
                    set_by_rid=None if by is None else self.rid(),
                )
                for by in [self.maybe(self.refusals()) for _ in range(skips)]
            ),
            ahead_admitted=self.count(),
            overtaken_by=tuple(self.rid() for _ in range(dice.choice((0, 1, 9)))),
            overtaken_passes=dice.choice((0, 1, 3)),
            overtaken_under=tuple(dice.sample(list(Policy), dice.choice((0, 1, 2)))),
            slices_taken=tuple(
                SliceShare(rid=self.rid(), tokens=self.count()) for _ in range(dice.choice((0, 1, 6, 9)))
            ),
            held=tuple(
                HeldShare(reason=None if at == 1 else self.reason(), is_own=dice.random() < 0.5, ns=self.count() * MS)
                for at in range(dice.choice((0, 1, 3, 7)))
            ),
            end=dice.choice(("admitted", "ended", "waiting")),
        )

    def chunk(self) -> ChunkFact:
        dice = self.dice
        reason = dice.choice([reason for reason in Reason if reason.name.startswith("ADMITTED")])
        prefix = dice.choice((0, 1, 1600))

        def ledgers() -> LedgerPart:
            return LedgerPart(
                rem_input=256,
                rem_chunk=self.maybe(96),
                remaining_total=640.25,
                remaining_current=dice.choice((640, -2)),
            )

        return ChunkFact(
            step=self.count(),
            at_ns=9 * MS,
            reason=reason,
            prefix_len=prefix,
            extend_len=80,
            extend_end=prefix + 80,
            seq_len=prefix + 1000,
            before=ledgers(),
            after=ledgers(),
            reserved_new_tokens=dice.choice((0, 1, 23)),
            need=self.maybe(120.0),
            have=640.0,
            overdrafts=tuple(dice.sample(OVERDRAFTS, dice.choice((0, 1, 2)))),
            other_prompts=dice.choice((0, 1, 3)),
            decode_rows=dice.choice((0, 1, 3)),
            step_ns=self.maybe(2 * MS),
            behind_ns=dice.choice((0, MS)),
            done_ns=self.maybe(11 * MS),
            failed=dice.random() < 0.2,
        )

    def life(self) -> Life:
        """A recorded one."""
        dice = self.dice
        accepted = dice.choice((0, 2 * MS)) - dice.choice((0, 40 * MS))
        asked = self.count()
        has_tokens = dice.random() < 0.7
        gap = GapFact(
            ns=8 * MS,
            step=self.count(),
            kind=dice.choice(list(StepKind)),
            prefill_tokens=dice.choice((0, 1, 55)),
            was_retracted=dice.random() < 0.5,
        )
        end = EndFact(
            step=99,
            at_ns=900 * MS,
            cause=dice.choice(list(Cause)),
            detail=dice.choice(("", "client_disconnected")),
            output_len=self.count(),
        )
        response = ResponseFact(
            first_byte_ns=self.maybe(20 * MS),
            last_byte_ns=self.maybe(901 * MS),
            bytes_sent=100,
            disconnected=dice.random() < 0.5,
        )
        return Life(
            rid=self.rid(),
            state=dice.choice(list(RequestState)),
            times_used=dice.choice((1, 1, 2)),
            accepted_ns=accepted,
            arrived_ns=3 * MS,
            arrived_wall_ns=self.maybe(1_700_000_000_123_000_000, 0),
            prompt_len=self.count(),
            prompt_pages=1,
            max_new_tokens=self.maybe(asked, 1),
            requested_new_tokens=asked,
            cached_len=None,
            waits=tuple(self.wait() for _ in range(dice.choice((0, 1, 2)))),
            chunks=tuple(self.chunk() for _ in range(dice.choice((0, 1, 3)))),
            parked=tuple(self.refusals() for _ in range(dice.choice((0, 0, 1)))),
            retractions=tuple(
                RetractionFact(step=5, at_ns=30 * MS, cause="kv_now", output_len=self.count(), lost_tokens=self.count())
                for _ in range(dice.choice((0, 1, 2, 13)))
            ),
            abort_asked_ns=self.maybe(800 * MS),
            first_token_ns=20 * MS if has_tokens else None,
            first_token_step=7 if has_tokens else None,
            last_token_ns=700 * MS if has_tokens else None,
            output_len=dice.choice((0, 1, 2, 70)),
            worst_gap=self.maybe(gap),
            end=self.maybe(end),
            response=self.maybe(response),
            record_ends_ns=1_000 * MS,
            record_ends_step=100,
        )

    # -- of a running engine ---------------------------------------------------------------------------------------

    def stretch(self, start_ns: int, blocker: str) -> WaitSpan:
        dice = self.dice
        ended = tuple(
            EndedBy(reason=self.reason().value, ns=5, passes=dice.choice((0, 1, 2000)), steps=dice.choice((0, 1, 5)))
            for _ in range(dice.choice((0, 1, 6)))
        )
        return WaitSpan(
            start_ns=start_ns,
            end_ns=start_ns + dice.choice((0, 500, 40 * MS)),
            blocker=blocker,
            passes=dice.choice((0, 1, 9)),
            ended_by=ended if blocker == "order" else (),
        )

    def decision(self) -> DecisionRow:
        dice = self.dice
        return DecisionRow(
            rid="r",
            step=self.count(),
            t_wall_s=1.0,
            order=0,
            is_continuation=False,
            prefix_len=64,
            candidate_extend=dice.choice((80, 1900)),
            selected_extend=80,
            extend_end=144,
            before=Ledgers(),
            after=Ledgers(),
            reserved_new_tokens=0,
            is_chunked=False,
            result="CONTINUE",
            reason=self.reason().value,
            admitted=True,
            overdrafts=tuple(dice.sample((*OVERDRAFTS, "kv_unheard_of"), dice.choice((0, 1, 2)))),
        )

    def entry(self, blocker: str) -> QueueEntry:
        dice = self.dice
        overtaker = Overtaker(
            rid=self.rid(),
            step=9,
            policy=dice.choice((*Policy, "")),
            order_key=dice.choice(KEYS),
            key=self.maybe(96.0),
            own_key=dice.choice((None, 0.0, 96.0, 96.0)),
        )
        need = self.maybe(dice.choice((1.0, 3.0, 500.5)))
        stopped_by = dice.choice(tuple(OF_REASON))
        stopper = Stopper(
            rid=self.rid(),
            reason=stopped_by.value,
            blocker=BLOCKERS[OF_REASON[stopped_by]],
            need=need,
            have=dice.choice((0.0, 2.0)),
            step=self.maybe(9),
        )
        return QueueEntry(
            rid="r",
            position=dice.choice((0, 7)),
            state=dice.choice(("waiting", "retracted")),
            age_s=1.25,
            prompt_len=100,
            blocker=blocker,
            reason=self.maybe(self.reason().value),
            need=need,
            have=dice.choice((0.0, 2.0)),
            who_stopped=self.maybe(stopper.rid),
            stopper=self.maybe(stopper),
            times_passed_over=dice.choice((0, 1, 4)),
            overtaken_by=dice.choice((0, 1, 33)),
            overtaker=self.maybe(overtaker),
            held_ns={name: self.count() * MS for name in dice.sample(BLOCKERS, dice.choice((0, 1, 3)))},
            order_ns=dice.choice(
                ({}, {"kv_total_exhausted": 7 * MS}, {"kv_total_exhausted": 7 * MS, "rows_exhausted": 7 * MS})
            ),
        )

    def told_live(self) -> dict[str, Any]:
        """A live one: what `sentences` takes."""
        dice = self.dice
        waits: list[WaitSpan] = []
        for _ in range(dice.choice((1, 2, 4))):
            waits.append(self.stretch(waits[-1].end_ns if waits else 3 * MS, dice.choice(BLOCKERS)))
        timeline = Timeline(
            accepted_ns=0,
            enqueued_ns=3 * MS,
            first_token_ns=self.maybe(90 * MS),
            ttft_ns=self.maybe(95 * MS),
            parts_ns={name: dice.choice((0, 4 * MS)) for name in (*TTFT_PARTS, "unheard_of")},
            blockers_ns={},
            waits=tuple(waits),
        )
        request = RequestRow(
            rid=self.rid(),
            state="waiting",
            accepted_wall_s=1.0,
            prompt_len=1000,
            max_new_tokens=20,
            outputs=dice.choice((0, 2)),
            tbt_p50_s=0.004,
            tbt_max_s=0.5,
            duration_s=2.5,
            retractions=dice.choice((0, 1, 2)),
            finish=self.maybe("length"),
        )
        detail = RequestDetail(
            engine_id="e",
            observe_seq=1,
            step=1,
            t_ns=1,
            t_wall_s=1.0,
            request=request,
            queue=self.maybe(self.entry(waits[-1].blocker)),
            timeline=timeline,
            decisions=tuple(self.decision() for _ in range(dice.choice((0, 1)))),
        )
        slices = tuple(SliceGiven(self.rid(), 16, self.count()) for _ in range(dice.choice((0, 1, 3, 5))))
        return {"detail": detail, "ahead": tuple(self.rid() for _ in range(dice.choice((0, 2, 5)))), "slices": slices}
