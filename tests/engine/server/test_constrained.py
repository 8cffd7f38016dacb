"""Constrained answers over HTTP, with a real model whose own answers are noise, and the official client."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from engine.events import StepPlanned
from engine.sampling_params import GrammarSpec
from engine.text.grammar import INSTALL_COMMAND, Compiled, Grammars
from tests.engine.server.live import DEADLINE_S, LiveServer, tiny_server, until

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["admit", "wait", "refuse"]},
        "tokens": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 8},
    },
    "required": ["verdict", "tokens", "why"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
#: Small enough for the whole of it to fit the largest number of tokens asked for here, whatever is drawn.
ROOM = 400


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = tiny_server(tmp_path_factory.mktemp("tiny"), num_pages=1024)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "Shall it run?", **change: Any) -> Any:
    wanted: dict[str, Any] = {"model": "tiny", "max_tokens": ROOM, "temperature": 1}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **(wanted | change))


def check(choice: Any) -> None:
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 2, "top_p": 0.9}])
def test_an_answer_is_json_that_fits_the_schema(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    # Greedy, this model prefers white space as long as there may be some: what a bias is for.
    check(ask(client, response_format=FORMAT, logit_bias=SPACES, **sampling).choices[0])


@pytest.fixture(autouse=True, scope="module")
def _spaces(live: LiveServer) -> None:
    for letter in " \t\n":
        (token_id,) = live.tokenizer.encode(letter, False)
        SPACES[str(token_id)] = -100


SPACES: dict[str, int] = {}


def test_several_choices_and_a_stream_are_constrained_as_well(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"response_format": FORMAT, "seed": 7, "logit_bias": SPACES}
    several = ask(client, n=3, **wanted).choices
    for choice in several:
        check(choice)
    assert len({choice.message.content for choice in several}) > 1
    events = ask(client, stream=True, **wanted)
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == several[0].message.content


def test_the_client_reads_an_answer_into_its_own_model(client: openai.OpenAI) -> None:
    class Verdict(pydantic.BaseModel):
        verdict: Literal["admit", "wait"]
        admitted: bool

    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        response_format=Verdict,
        max_tokens=ROOM,
        seed=3,
        logit_bias=SPACES,
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_any_object_when_no_schema_is_given(client: openai.OpenAI, live: LiveServer) -> None:
    ends = {str(live.tokenizer.encode(letter, False)[0]): 60 for letter in '"}'}
    answer = ask(client, response_format={"type": "json_object"}, temperature=0, logit_bias=SPACES | ends)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("field", ["regex", "guided_regex"])
def test_an_answer_matches_the_expression_whole(client: openai.OpenAI, field: str) -> None:
    expression = r"(GET|PUT) /[a-z]{2,6}\?id=[0-9]{3}"
    answers = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=64, seed=1, n=2, extra_body={field: expression}
    )
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(expression, choice.text), choice.text
    assert answers.usage is not None
    # Nothing is spent on an end that is certain: every token is text.
    assert answers.usage.completion_tokens == sum(len(choice.text) for choice in answers.choices)


def test_an_answer_that_is_cut_is_the_beginning_of_one(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=FORMAT, max_tokens=10, seed=1, logit_bias=SPACES).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.content.startswith('{"verdict"'[:10])


def test_plain_requests_beside_constrained_ones_are_not_touched(client: openai.OpenAI) -> None:
    def plain(seed: int) -> str:
        return str(ask(client, seed=seed, max_tokens=40).choices[0].message.content)

    def constrained(seed: int) -> str:
        return str(ask(client, response_format=FORMAT, seed=seed, logit_bias=SPACES).choices[0].message.content)

    jobs = [plain, constrained] * 4
    alone = [job(seed) for seed, job in enumerate(jobs)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(lambda job: job[1](job[0]), enumerate(jobs))) == alone


def test_answers_survive_retractions(tmp_path_factory: pytest.TempPathFactory, client: openai.OpenAI) -> None:
    prompts = [f"{letter} question of some length, number {letter}" for letter in "abcdef"]
    expression = r"([a-z]{7} ){12}[0-9]{3}"

    def answers(client: openai.OpenAI) -> list[str]:
        # One call, so that all of them are in the engine at once.
        answer = client.completions.create(
            model="tiny",
            prompt=prompts,
            max_tokens=200,
            seed=5,
            frequency_penalty=0.2,
            extra_body={"regex": expression},
        )
        return [choice.text for choice in answer.choices]

    tight = tiny_server(tmp_path_factory.mktemp("tight"), num_pages=110, conservativeness=0.02)
    try:
        with openai.OpenAI(base_url=f"{tight.url}/v1", api_key="unused", max_retries=0) as crowded:
            got = answers(crowded)
        plans = [event for event in tight.sink.events if isinstance(event, StepPlanned)]
        assert any(plan.retractions for plan in plans), "the pool must be too small for all"
        tight.assert_nothing_held()
    finally:
        tight.stop()
    assert got == answers(client)
    assert all(re.fullmatch(expression, text) for text in got)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a count that takes gigabytes": ({"regex": "a{900000}"}, "regex", "its first token runs into the limits"),
    "a type that is none": ({"schema": {"type": "strin"}}, "response_format", "Invalid type: strin"),
    "a keyword that cannot be followed": ({"schema": {"not": {}}}, "response_format", "Unimplemented keys"),
    "an expression that is none": ({"regex": "(a"}, "regex", "unclosed group"),
    "look-around": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_followed_is_refused_before_any_work(live: LiveServer, client: openai.OpenAI, case: str) -> None:
    change, param, words = BAD[case]
    if "schema" in change:
        change = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": change["schema"]}}}
    steps = live.engine.work_steps
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=change)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert words in caught.value.message
    assert live.engine.work_steps == steps


def test_a_grammar_that_meets_its_limits_ends_its_request_alone(live: LiveServer, client: openai.OpenAI) -> None:
    keys = {f"k{i}": {"pattern": "^[a-z]{1,50}$", "type": "string"} for i in range(700)}
    wide: dict[str, Any] = {"properties": keys}
    wide |= {"type": "object", "additionalProperties": False}
    # Below another object: a grammar whose first token meets a limit is refused at once.
    wide = {"type": "object", "properties": {"a": wide}, "required": ["a"], "additionalProperties": False}
    too_wide = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(ask, client, response_format=FORMAT, seed=1, logit_bias=SPACES)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, response_format=too_wide)
        check(healthy.result().choices[0])
    assert caught.value.code == "grammar_failed"
    live.assert_nothing_held()


def test_without_the_extra_the_answer_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={"regex": "never asked before"})
    assert (caught.value.param, caught.value.code) == ("regex", "unsupported_parameter")
    assert INSTALL_COMMAND in caught.value.message


def test_grammars_wait_in_a_line_of_their_own(
    live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is compiled at a time; who waits too long, or finds the line full, is told so, and plain requests go on."""
    gate, compile_, grammars = threading.Event(), Grammars._compile, live.grammars
    assert grammars is not None
    begun: list[str] = []

    def slow(self: Grammars, spec: GrammarSpec) -> Compiled:
        begun.append(threading.current_thread().name)
        assert gate.wait(DEADLINE_S)
        return compile_(self, spec)

    monkeypatch.setattr(Grammars, "_compile", slow)
    monkeypatch.setattr("engine.server.constraints._MAX_WAIT_S", 0.3)
    monkeypatch.setattr("engine.text.grammar.MAX_WAITING", 2)

    def refusal(expression: str) -> str:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, extra_body={"regex": expression})
        assert (caught.value.status_code, caught.value.code) == (503, "grammar_busy")
        return str(caught.value.message)

    with ThreadPoolExecutor(3) as pool:
        try:
            late = [pool.submit(refusal, expression) for expression in ("slow", "slow", "behind")]
            until(lambda: len(grammars._waiting) == 2, "two grammars wait")
            assert "2 grammars wait" in refusal("one too many")
            assert ask(client, max_tokens=2).choices
            assert all("not compiled after 0.3 s" in future.result() for future in late)
        finally:
            gate.set()
    until(lambda: not grammars._waiting, "the end of the line")
    assert len(begun) == 2, "two clients, one grammar, one compilation"
    assert set(begun) == {"grammar_0"}
    assert ask(client, extra_body={"regex": "behind"}).choices[0].message.content == "behind"


def test_a_grammar_that_is_no_longer_kept_is_not_compiled_on_the_engines_thread(
    live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.text.grammar._KEPT", 1)
    threads: list[str] = []
    compile_ = Grammars._compile

    def watched(self: Grammars, spec: GrammarSpec) -> Compiled:
        threads.append(threading.current_thread().name)
        return compile_(self, spec)

    monkeypatch.setattr(Grammars, "_compile", watched)
    expressions = [f"evicted {number}" for number in range(4)]
    gate = threading.Event()
    live.thread.call(lambda: gate.wait(DEADLINE_S))  # between two steps: every request arrives before one is taken
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, client, extra_body={"regex": expression}) for expression in expressions]
        until(lambda: live.thread._mailbox.pending_requests == 4, "four requests before the engine")
        gate.set()
        assert [answer.result().choices[0].message.content for answer in answers] == expressions
    assert set(threads) == {"grammar_0"}
    assert len(threads) == 4
