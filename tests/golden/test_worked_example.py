"""The worked example, every number written out, so that a person can follow one admission decision after another.

Page 16, input budget 128, chunk 96, pool 4096 tokens. Eight requests decode; A (160 tokens), B (80, of which 64 are
cached), C (48) and D (32) wait, in this order, each with room for 16 output tokens. How the numbers come about:

opens     The ledgers when the pass starts. Each of the 8 decode rows takes one token from every ledger, once:
          input 128 - 8 = 120, chunk 96 - 8 = 88. Memory: free + evictable = 3648 + 64 = 3712 tokens;
          current 3712 - 8 = 3704; total 3704 - promised = 3368, where promised is what running requests may still
          grow: 8 x (64 - 4 outputs) x 0.7 = 336 (0.7 is the new-token ratio).
has       tokens found in the cache, whole pages; wants: the rest; gets: what this step computes.
need      must be smaller than the room: wants + 16 outputs + one page of 16. For B the room is total - 64: locking its
          cached 64 tokens takes them out of the evictable ones.
charges   input and chunk fall by the page-rounded extend; current by that plus one page (A: 80 + 16 = 96); total by
          that plus the 16 outputs, but only when the prompt ends here (A is cut: 96; B: 16 + 16 + 16 = 48, and 64
          pinned).
batch     rid[from:to] are the prompt pieces, then the decode rows.
"""

from __future__ import annotations

import pytest

from tests.conformance.cases import RECORDED, cases_of
from tests.golden.worked_example import Play, scenario

FCFS = [
    # A fits the chunk ledger only in part: 88 tokens floored to whole pages are 80. Its 80 leave 8 tokens of chunk,
    # less than one page, so B gets nothing although it would need only one page.
    """
opens     free 3648 + evictable 64, 8 decode rows, promised 336
          input 120, chunk 88, total 3368, current 3704
A         has 0, wants 160, gets 80: admitted_first_chunk, need 192 < 3368
          input 120->40, chunk 88->8, total 3368->3272, current 3704->3608
B         has 64, wants 16, gets 0: chunk_below_page, need 48 < 3208
          input 40, chunk 8, total 3272, current 3608
batch     A[0:80] + 8 decodes, order A B C D
left      continues A, waits B C D
""",
    # The continuation goes first, without being matched or tested again. The decodes have 5 outputs each now:
    # promised 8 x 59 x 0.7 = 330.4. A ends here, so its 16 outputs are charged too: 80 + 16 + 16 = 112.
    """
opens     free 3568 + evictable 64, 8 decode rows, promised 330.4
          input 120, chunk 88, total 3293.6, current 3624
A         has 80, wants 80, gets 80: admitted_last_chunk
          input 120->40, chunk 88->8, total 3293.6->3181.6, current 3624->3528
B         has 64, wants 16, gets 0: chunk_below_page, need 48 < 3117.6
          input 40, chunk 8, total 3181.6, current 3528
batch     A[80:160] + 8 decodes, order B C D
left      continues nobody, waits B C D
""",
    # A decodes now, the ninth row: input 119, chunk 87; promised (8 x 58 + 15) x 0.7 = 335.3. B 16 and C 48 fit whole,
    # D gets floor16(23) = 16 of its 32 tokens and becomes the continuation.
    """
opens     free 3488 + evictable 64, 9 decode rows, promised 335.3
          input 119, chunk 87, total 3207.7, current 3543
B         has 64, wants 16, gets 16: admitted_whole, need 48 < 3143.7
          input 119->103, chunk 87->71, total 3207.7->3095.7, current 3543->3447
C         has 0, wants 48, gets 48: admitted_whole, need 80 < 3095.7
          input 103->55, chunk 71->23, total 3095.7->3015.7, current 3447->3383
D         has 0, wants 32, gets 16: admitted_first_chunk, need 64 < 3015.7
          input 55->39, chunk 23->7, total 3015.7->2983.7, current 3383->3351
batch     B[64:80] C[0:48] D[0:16] + 9 decodes, order B C D
left      continues D, waits nobody
""",
    # The queue is empty and the continuation finishes beside eleven decode rows:
    # promised (8 x 57 + 14 + 15 + 15) x 0.7 = 350.
    """
opens     free 3392 + evictable 0, 11 decode rows, promised 350
          input 117, chunk 85, total 3031, current 3381
D         has 16, wants 16, gets 16: admitted_last_chunk
          input 117->101, chunk 85->69, total 3031->2983, current 3381->3349
batch     D[16:32] + 11 decodes, order
left      continues nobody, waits nobody
""",
]

SHORTEST_FIRST = [
    # Least uncached work first: B 16, D 32, C 48, A 160. C is cut to floor16(40) = 32 of its 48 tokens and becomes the
    # continuation; 8 tokens of chunk are left for A, less than one page.
    """
opens     free 3648 + evictable 64, 8 decode rows, promised 336
          input 120, chunk 88, total 3368, current 3704
B         has 64, wants 16, gets 16: admitted_whole, need 48 < 3304
          input 120->104, chunk 88->72, total 3368->3256, current 3704->3608
D         has 0, wants 32, gets 32: admitted_whole, need 64 < 3256
          input 104->72, chunk 72->40, total 3256->3192, current 3608->3560
C         has 0, wants 48, gets 32: admitted_first_chunk, need 80 < 3192
          input 72->40, chunk 40->8, total 3192->3144, current 3560->3512
A         has 0, wants 160, gets 0: chunk_below_page, need 192 < 3144
          input 40, chunk 8, total 3144, current 3512
batch     B[64:80] D[0:32] C[0:32] + 8 decodes, order B D C A
left      continues C, waits A
""",
    # Ten rows decode: input 118, chunk 86; promised (8 x 59 + 15 + 15) x 0.7 = 351.4. C's last 16 leave 70 of chunk;
    # A gets floor16(70) = 64.
    """
opens     free 3568 + evictable 0, 10 decode rows, promised 351.4
          input 118, chunk 86, total 3206.6, current 3558
C         has 32, wants 16, gets 16: admitted_last_chunk
          input 118->102, chunk 86->70, total 3206.6->3158.6, current 3558->3526
A         has 0, wants 160, gets 64: admitted_first_chunk, need 192 < 3158.6
          input 102->38, chunk 70->6, total 3158.6->3078.6, current 3526->3446
batch     C[32:48] A[0:64] + 10 decodes, order A
left      continues A, waits nobody
""",
    # A continuation is not rounded to pages: A gets all 85 tokens of the chunk ledger and is charged ceil16(85) = 96,
    # which takes that ledger to -11. The record names it: overdraft chunk_page_rounding.
    """
opens     free 3456 + evictable 0, 11 decode rows, promised 354.9
          input 117, chunk 85, total 3090.1, current 3445
A         has 64, wants 96, gets 85: admitted_next_chunk (overdraft chunk_page_rounding)
          input 117->21, chunk 85->-11, total 3090.1->2978.1, current 3445->3333
batch     A[64:149] + 11 decodes, order
left      continues A, waits nobody
""",
    """
opens     free 3344 + evictable 0, 11 decode rows, promised 347.2
          input 117, chunk 85, total 2985.8, current 3333
A         has 149, wants 11, gets 11: admitted_last_chunk
          input 117->101, chunk 85->69, total 2985.8->2937.8, current 3333->3301
batch     A[149:160] + 11 decodes, order
left      continues nobody, waits nobody
""",
]

#: A has 80 tokens done when B, C and D wait. Shorter prompts would fit beside it: B 16 + D 32 = 48 <= 88 - 16, with C's
#: 48 they would be 96. So A's piece is capped at floor16(88 - 48) = 32.
CAPPED_CONTINUATION = """
opens     free 3568 + evictable 64, 8 decode rows, promised 336
          input 120, chunk 88, total 3288, current 3624
A         has 80, wants 80, gets 32: admitted_next_chunk
          input 120->88, chunk 88->56, total 3288->3240, current 3624->3576
B         has 64, wants 16, gets 16: admitted_whole, need 48 < 3176
          input 88->72, chunk 56->40, total 3240->3128, current 3576->3480
D         has 0, wants 32, gets 32: admitted_whole, need 64 < 3128
          input 72->40, chunk 40->8, total 3128->3064, current 3480->3432
C         has 0, wants 48, gets 0: chunk_below_page, need 80 < 3064
          input 40, chunk 8, total 3064, current 3432
batch     A[80:112] B[64:80] D[0:32] + 8 decodes, order B D C, cap 32
left      continues A, waits C
"""


@pytest.mark.parametrize(("policy", "steps"), [("fcfs", FCFS), ("shortest-prefill-first", SHORTEST_FIRST)])
def test_the_worked_example(policy: str, steps: list[str]) -> None:
    play = Play(policy)
    for number, expected in enumerate(steps, 1):
        assert play.step().splitlines() == expected.strip().splitlines(), f"step {number}"


def test_the_worked_example_with_a_capped_continuation() -> None:
    play = Play("shortest-prefill-first", computed_of_a=80)
    assert play.step().splitlines() == CAPPED_CONTINUATION.strip().splitlines()


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first"])
@pytest.mark.parametrize("computed_of_a", [0, 80])
def test_the_example_is_the_recorded_one(policy: str, computed_of_a: int) -> None:
    """The first step above is what the reference decided: same scenario as in the recorded file."""
    own = scenario(policy, computed_of_a=computed_of_a)
    recorded = {case["scenario"]["id"]: case["scenario"] for case in cases_of(RECORDED / "article.jsonl.xz")}
    assert own == recorded[own["id"]]
