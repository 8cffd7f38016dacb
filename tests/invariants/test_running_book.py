"""The running requests are counted by ticks: their tokens and promises are those of counting each one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import RequestArrived
from invariants.running_book import Running, ShadowRequest, growth_of

CLIP = 6


def request(number: int, prompt_len: int, max_new: int, ignore_eos: bool) -> ShadowRequest:
    return ShadowRequest(
        RequestArrived(0, 0, 0, f"r{number}", prompt_len, max_new, max_new, b"", None, ignore_eos, None, None, 0)
    )


#: (what happens, whom it concerns, by how much)
happenings = st.lists(
    st.tuples(
        st.sampled_from(["tick", "tick", "tick", "join", "leave", "change"]), st.integers(0, 5), st.integers(0, 9)
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    made=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15), st.booleans()), min_size=6, max_size=6),
    happens=happenings,
    ratio=st.floats(0.05, 1.0),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_ticks_count_like_tokens(
    made: list[tuple[int, int, bool]], happens: list[tuple[str, int, int]], ratio: float, page_size: int
) -> None:
    running, requests = Running(CLIP), [request(number, *facts) for number, facts in enumerate(made)]
    outputs, order = [0] * 6, []
    for what, who, amount in happens:
        one = requests[who]
        if what == "tick":
            running.tick()
            outputs = [count + (number in order) for number, count in enumerate(outputs)]
        elif what == "join" and who not in order:
            running.join(one)
            order.append(who)
        elif what == "leave" and who in order:
            running.leave(one)
            order.remove(who)
        elif what == "change":
            one.outputs = outputs[who] = amount
        left = [min(one.max_new - outputs[number], CLIP) for number, one in enumerate(requests)]
        assert [one.outputs for one in requests] == outputs
        assert running.order == tuple(f"r{number}" for number in order)
        assert running.plain_growth == sum(left[number] for number in order if not made[number][2])
        assert running.eos_growth == sum(left[number] for number in order if made[number][2])
        promised = [growth_of(requests[at], clip=CLIP, ratio=ratio, page_size=page_size) for at in order]
        claims = [page_size for at in order if (made[at][0] + outputs[at] - 1) % page_size == 0]
        assert running.pages_promised(ratio, page_size) == (sum(promised), sum(claims))
