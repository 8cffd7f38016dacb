"""The feed: many viewers cost one fetch, an engine that is gone costs no answer, and nothing grows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest
from fake_engine import FakeEngine, FakeServer

from dashboard.feed import MAX_ROWS, PARTS, Feed
from dashboard.words import CHINESE, ENGLISH, Lang
from telemetry.client import LiveSource, SourceUnavailable
from telemetry.observe import EngineStatus, Explanation, RequestDetail

HEAD = frozenset({"latency", "requests"})


class Clock:
    """A clock that stands until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingSource:
    """A fake engine without HTTP, which counts questions and can be gone."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.asked: Counter[str] = Counter()
        self.gone = False

    def _answer(self, name: str, **query: str):
        self.asked[name] += 1
        if self.gone:
            raise SourceUnavailable("gone", last_contact_wall_s=1.0)
        return self.engine.answer(f"/observe/{name}", {key: [value] for key, value in query.items()})

    def status(self) -> EngineStatus:
        return self._answer("status")

    def queue(self, limit: int = 500):
        return self._answer("queue", limit=str(limit))

    def passes(self, n: int = 32):
        return self._answer("passes", n=str(n))

    def latency(self):
        return self._answer("latency")

    def requests(self, limit: int = 500):
        return self._answer("requests", limit=str(limit))

    def breakdown(self):
        return self._answer("breakdown")

    def lanes(self, n: int = 40):
        return self._answer("lanes", n=str(n))

    def pages(self):
        return self._answer("pages")

    def page(self, page: int):
        return self._answer(f"pages/{page}")

    def pool(self):
        return self._answer("pool")

    def tree(self, *, node: int | None = None, opened: Sequence[int] = (), top: int = 20):
        asked = {"top": str(top)} | ({} if node is None else {"node": str(node)})
        return self._answer("tree", **asked, open=",".join(map(str, opened)))

    def laws(self):
        return self._answer("laws")

    def evidence(self):
        return self._answer("evidence")

    def bundle(self, name: str):
        return self._answer(f"evidence/{name}")

    def request(self, rid: str) -> RequestDetail | None:
        return self._answer(f"requests/{rid}")

    def explain(self, rid: str, lang: Lang = ENGLISH) -> Explanation | None:
        found = self._answer(f"explain/{rid}")
        return found and found.model_copy(update={"sentences": (lang,)})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(engine: FakeEngine) -> CountingSource:
    return CountingSource(engine)


@pytest.fixture
def feed(source: CountingSource, clock: Clock) -> Feed:
    return Feed(source, wall=lambda: 1_000_000.0 + clock.now, mono=clock)


class MovingSource(CountingSource):
    """An engine that makes steps between two questions of one refresh."""

    def _answer(self, name: str, **query: str):
        answer = super()._answer(name, **query)
        if name == "status":
            for _ in range(40):
                self.engine.tick()
        return answer


def test_the_head_counts_the_very_queue_that_stands_below_it(engine: FakeEngine, clock: Clock) -> None:
    source = MovingSource(engine)
    feed = Feed(source, wall=lambda: 1.0, mono=clock)
    differed = 0
    for _ in range(12):
        before = engine.status()
        look = feed.look(HEAD | {"queue"}, max_age_s=0.0)
        assert look.status is not None
        assert look.queue is not None
        ages = [entry.age_s for entry in look.queue.entries]
        assert look.status.waiting == look.queue.total == len(ages)
        assert look.status.waiting_by_blocker == look.queue.by_blocker
        assert look.status.waiting_oldest_s == max(ages, default=0.0)
        assert look.status.requests["waiting"] + look.status.requests["retracted"] == look.queue.total
        differed += (before.waiting, before.waiting_oldest_s) != (look.queue.total, look.status.waiting_oldest_s)
        clock.now += 1.0
    assert differed > 3


def test_viewers_at_the_same_moment_share_one_fetch(feed: Feed, source: CountingSource, clock: Clock) -> None:
    looks = [feed.look(HEAD | {"queue"}, max_age_s=1.0) for _ in range(20)]
    assert all(look is looks[0] for look in looks)
    assert source.asked == {"status": 1, "queue": 1, "latency": 1, "requests": 1}


def test_threads_at_the_same_moment_share_one_fetch(source: CountingSource) -> None:
    feed = Feed(source)
    threads = [threading.Thread(target=feed.look, args=(PARTS,), kwargs={"max_age_s": 60.0}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(source.asked.values()) == {1}


def test_only_parts_that_somebody_looks_at_are_fetched(feed: Feed, source: CountingSource, clock: Clock) -> None:
    feed.look(HEAD | {"pages"}, max_age_s=1.0)
    assert source.asked["pages"] == 1
    for _ in range(30):
        clock.now += 1
        source.engine.tick()
        look = feed.look(HEAD, max_age_s=1.0)
    assert source.asked["pages"] < 15
    assert look.pages is None, "a part that nobody fetched for long must not look new"
    assert feed.look(HEAD | {"pages"}, max_age_s=1.0).pages is not None


def test_an_engine_where_nothing_happened_is_asked_for_its_status_only(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    first = feed.look(PARTS, max_age_s=1.0)
    clock.now += 2
    second = feed.look(PARTS, max_age_s=1.0)
    assert source.asked["status"] == 2
    assert source.asked["passes"] == 1
    assert second.passes is first.passes
    assert second.contact_mono_s == clock.now
    source.engine.tick()
    clock.now += 2
    assert feed.look(PARTS, max_age_s=1.0).passes is not first.passes


def test_a_gone_engine_leaves_the_last_answers_and_the_time_of_contact(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    good = feed.look(PARTS, max_age_s=1.0)
    source.gone = True
    clock.now += 7
    gone = feed.look(PARTS, max_age_s=1.0)
    assert gone.error == "gone"
    assert gone.queue is good.queue
    assert gone.contact_wall_s == good.contact_wall_s == 1_000_100.0
    source.gone = False
    clock.now += 1
    assert feed.look(PARTS, max_age_s=1.0).error is None


def test_a_gone_engine_is_not_asked_more_often_than_a_live_one(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    source.gone = True
    for _ in range(10):
        look = feed.look(PARTS, max_age_s=1.0)
    assert look.status is None
    assert look.contact_wall_s is None
    assert source.asked["status"] == 1


def test_fr_48_a_restarted_engine_shows_nothing_of_the_old_one(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    feed.look(PARTS, max_age_s=1.0)
    source.engine = FakeEngine(seed=99)
    clock.now += 2
    look = feed.look(PARTS, max_age_s=1.0)
    assert look.status is not None
    assert {look.status.engine_id} == {getattr(look, part).engine_id for part in PARTS} == {"fake-99"}


def test_viewers_of_two_languages_each_get_their_own_explanation(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    rid = source.engine.waiting[0].rid

    def said(lang: Lang) -> tuple[str, ...]:
        explanation = feed.detail(rid, lang, max_age_s=1.0).explanation
        assert explanation is not None
        return explanation.sentences

    assert [said(lang) for lang in (ENGLISH, CHINESE, ENGLISH, CHINESE)] == [(ENGLISH,), (CHINESE,)] * 2
    assert source.asked[f"explain/{rid}"] == 2, "one each, shared by all who read it"
    clock.now += 2
    source.gone = True
    assert said(CHINESE) == (CHINESE,)


def test_an_explanation_in_another_language_is_better_than_none(feed: Feed, source: CountingSource) -> None:
    rid = source.engine.waiting[0].rid
    feed.detail(rid, ENGLISH, max_age_s=1.0)
    source.gone = True
    found = feed.detail(rid, CHINESE, max_age_s=1.0)
    assert found.explanation is not None
    assert found.explanation.sentences == (ENGLISH,)
    assert found.error == "gone"


def test_details_are_bounded_and_fall_back_to_the_last_answer(feed: Feed, source: CountingSource, clock: Clock) -> None:
    for req in list(source.engine.finished)[:40]:
        assert feed.detail(req.rid, max_age_s=1.0).detail is not None
    assert len(feed._details) == 16
    last = list(source.engine.finished)[39].rid
    source.gone = True
    clock.now += 5
    kept = feed.detail(last, max_age_s=1.0)
    assert kept.error == "gone"
    assert kept.explanation is not None
    assert feed.detail("nobody", max_age_s=1.0).explanation is None


def test_questions_of_a_view_are_shared_bounded_and_fall_back_to_the_last_answer(
    feed: Feed, source: CountingSource, clock: Clock
) -> None:
    def page(number: int):
        return feed.ask(("page", number), lambda source: source.page(number), max_age_s=1.0)

    assert page(3).value is page(3).value
    assert source.asked["pages/3"] == 1
    source.gone = True
    clock.now += 2
    kept = page(3)
    assert kept.error == "gone"
    assert kept.value is not None
    for number in range(100):
        page(number)
    assert len(feed._asked) == 32


def test_a_moment_is_asked_for_again_while_the_engine_steps_between_its_answers(
    feed: Feed, source: CountingSource
) -> None:
    questions = {("tree",): lambda source: source.tree()}
    look, asked = feed.moment(PARTS, questions)
    assert source.asked["tree"] == 1, "an engine that stands answers of one step at once"
    steps_left, tree = [2], source.tree

    def stepping(**asked: object):
        if steps_left[0]:
            steps_left[0] -= 1
            source.engine.tick()
        return tree()

    source.tree = stepping
    source.asked.clear()
    look, asked = feed.moment(PARTS, questions)
    assert look.status is not None
    assert asked["tree",].value.step == look.status.step == source.engine.step
    assert 1 < source.asked["tree"] <= 3
    source.gone = True
    look, asked = feed.moment(PARTS, questions)
    assert (look.error, asked["tree",].error) == ("gone", "gone")


def test_over_http_the_number_of_rows_is_asked_for_and_bounded(server: FakeServer) -> None:
    for _ in range(700):
        server.engine.add(16, 4)
    look = Feed(LiveSource(server.url)).look(PARTS, max_age_s=1.0)
    assert look.error is None
    assert look.queue is not None
    assert len(look.queue.entries) == MAX_ROWS
    assert look.queue.total > 700


def test_a_port_where_nobody_listens_is_an_error_that_names_the_address() -> None:
    with FakeServer(FakeEngine()) as server:
        url = server.url
    look = Feed(LiveSource(url)).look(HEAD, max_age_s=1.0)
    assert look.error is not None
    assert url in look.error
