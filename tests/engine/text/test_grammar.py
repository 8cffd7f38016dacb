"""Grammars: whatever is drawn under a mask fits its schema or expression, and an end comes where one may."""

from __future__ import annotations

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import GrammarSpec
from engine.text import grammar as module
from engine.text.grammar import INSTALL_COMMAND, GrammarError, Grammars, GrammarState
from engine.text.tokenizer import ByteTokenizer

EOS = 257
TOKENIZER = ByteTokenizer(400)
GRAMMARS = Grammars(TOKENIZER, 400)


def allowed(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(state.allowed().view(np.uint8), bitorder="little")).tolist())


def walk(spec: GrammarSpec, seed: int, *, steps: int = 3000) -> str:
    """A text drawn at random under the masks of `spec`, until it ends. Closing ones are preferred: it must end."""
    state, rng, tokens = GRAMMARS.state_of(spec), random.Random(seed), []
    for _ in range(steps):
        may = allowed(state)
        if EOS in may and (rng.random() < 0.3 or len(may) == 1):
            assert state.push(EOS)
            break
        closing = may & set(b'"]}') if rng.random() < 0.3 else set()
        token = rng.choice(sorted(closing or may - {EOS}))
        tokens.append(token)
        assert state.push(token)
        if state.is_complete:
            break
    else:
        raise AssertionError("the text did not end")
    return b"".join(map(TOKENIZER.token_bytes, tokens)).decode()


def schema(content: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(content))


ADDRESS = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "Grün"]}, "maxItems": 3},
        "address": {"anyOf": [{"type": "null"}, ADDRESS]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer"},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]+$"},
        {"const": {"a": [1, 2]}},
        {"enum": ["x", 1, None, "ü"]},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "ключ", 'q"']), inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("seed", range(8))
def test_a_text_under_a_schema_is_json_that_fits_it(seed: int) -> None:
    jsonschema.validate(json.loads(walk(schema(PERSON), seed)), PERSON)


@given(content=SCHEMAS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_text_under_any_schema_fits_it(content: dict[str, Any], seed: int) -> None:
    jsonschema.validate(json.loads(walk(schema(content), seed)), content)


@pytest.mark.parametrize(
    "expression",
    [
        "yes|no",
        r"[0-9]{3}-[0-9]{4}",
        r"^abc$",
        r"a/b\.c",
        r"(ab|cd){2,3}e?",
        r"Grüße, [A-Z][a-z]{2,5}!",
        r'"[^"]{0,5}"',
    ],
)
def test_a_text_under_an_expression_is_matched_whole(expression: str) -> None:
    for seed in range(6):
        text = walk(GrammarSpec("regex", expression), seed)
        assert re.fullmatch(expression.removeprefix("^").removesuffix("$"), text), text


def test_white_space_does_not_go_on_for_ever() -> None:
    state = GRAMMARS.state_of(schema({"type": "object"}))
    assert state.push(ord("{"))
    count = 0
    while ord(" ") in allowed(state):
        assert state.push(ord(" "))
        count += 1
    assert count == 40


def test_the_end_is_allowed_exactly_where_the_text_may_end() -> None:
    state = GRAMMARS.state_of(GrammarSpec("regex", "ab?"))
    assert allowed(state) == {ord("a")}
    assert state.push(ord("a"))
    assert allowed(state) == {ord("b"), EOS}
    assert not state.is_complete
    assert state.push(ord("b"))
    assert state.is_complete
    assert allowed(state) == {EOS}


def test_walks_of_the_same_grammar_do_not_meet() -> None:
    spec = GrammarSpec("regex", "a+b")
    one, other = GRAMMARS.state_of(spec), GRAMMARS.state_of(spec)
    assert one.push(ord("a"))
    assert allowed(other) == {ord("a")}
    assert allowed(one) == {ord("a"), ord("b")}


def test_tokens_without_text_and_beyond_the_tokenizer_are_never_allowed() -> None:
    grammars = Grammars(ByteTokenizer(258), 300)
    may = allowed(grammars.state_of(GrammarSpec("regex", r"(.|\n)*")))
    assert EOS in may
    assert not may & {256, *range(258, 300)}


def test_a_token_that_is_not_allowed_is_refused_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    state = GRAMMARS.state_of(GrammarSpec("regex", "secret"))
    assert not state.push(ord("x"))
    assert not state.push(EOS)
    assert not state.push(ord("s"))
    assert len(allowed(state)) >= 400, "a row without a choice would end the step"
    assert capfd.readouterr() == ("", "")


BAD: dict[str, tuple[GrammarSpec, str]] = {
    "expression": (GrammarSpec("regex", "(ab"), "^regular expression: unclosed group$"),
    "look-around": (GrammarSpec("regex", "(?=x)y"), "look-around"),
    "pattern": (schema({"type": "string", "pattern": "(ab"}), "^regular expression: unclosed group$"),
    "type": (schema({"type": "strin"}), "Invalid type: strin"),
    "keyword": (schema({"not": {}}), r'Unimplemented keys: \["not"\]'),
    "reference": (schema({"$ref": "#/nope"}), "does not exist"),
    "contradiction": (schema({"type": "array", "minItems": 3, "maxItems": 2}), "Unsatisfiable"),
    "no JSON": (GrammarSpec("json_schema", "{"), "."),
    "no schema": (GrammarSpec("json_schema", "7"), "."),
    "huge number": (schema({"type": "integer", "minimum": 10**30}), "."),
    "deep": (GrammarSpec("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000), "."),
    "huge count": (GrammarSpec("regex", "a{900000}"), "first token runs into the limits"),
    "huge nested counts": (GrammarSpec("regex", "(a{10000}){10000}"), "first token runs into the limits"),
    "too long": (GrammarSpec("regex", "a" * 65_537), "it has 65537 characters; at most 65536"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_followed_is_refused_with_the_reason(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    spec, reason = BAD[case]
    with pytest.raises(GrammarError, match=reason) as caught:
        GRAMMARS.state_of(spec)
    assert len(str(caught.value)) <= 200
    assert not caught.value.unavailable
    assert not GRAMMARS.is_ready(spec)
    assert capfd.readouterr() == ("", "")


def test_a_grammar_that_meets_its_limits_later_refuses_whatever_comes() -> None:
    wide = {"properties": {f"k{i}": {"pattern": "^[a-z]{1,50}$", "type": "string"} for i in range(900)}}
    state = GRAMMARS.state_of(schema(wide))
    assert not state.push(ord("{"))
    assert len(allowed(state)) >= 400, "a row without a choice would end the step"
    assert not state.push(ord('"'))


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError) as caught:
        Grammars(TOKENIZER, 400).state_of(GrammarSpec("regex", "a"))
    assert caught.value.unavailable
    assert INSTALL_COMMAND in str(caught.value)


def test_what_was_used_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    grammars = Grammars(TOKENIZER, 400)
    a, b, c = (GrammarSpec("regex", letter) for letter in "abc")
    for spec in (a, b, a, c):
        grammars.state_of(spec)
    assert [grammars.is_ready(spec) for spec in (a, b, c)] == [True, False, True]


def test_what_is_kept_is_bounded_by_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition counts as what it repeats: nine characters may take megabytes."""
    monkeypatch.setattr(module, "_KEPT_WEIGHT", 1000)
    grammars = Grammars(TOKENIZER, 400)
    small, counted, long, alone = (GrammarSpec("regex", text) for text in ("b", "a{2,600}", "c" * 500, "d{5000}"))
    grammars.state_of(small)
    grammars.state_of(counted)
    assert grammars.is_ready(small)
    grammars.state_of(long)
    assert [grammars.is_ready(spec) for spec in (small, counted, long)] == [False, False, True]
    grammars.state_of(alone)
    assert [grammars.is_ready(spec) for spec in (long, alone)] == [False, True], "the largest is kept alone"


def test_many_threads_may_compile_and_copy() -> None:
    grammars = Grammars(TOKENIZER, 400)
    specs = [GrammarSpec("regex", f"{letter}+") for letter in "abcd"] * 8
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(grammars.state_of, specs))
    for spec, state in zip(specs, states, strict=True):
        assert allowed(state) == {ord(spec.text[0])}


@given(seed=st.integers(0, 100), cut=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_the_state_follows_from_the_tokens_alone(seed: int, cut: int) -> None:
    """What a request recomputed after a retraction relies on."""
    text = walk(schema(PERSON), seed).encode()[:cut]
    one, other = GRAMMARS.state_of(schema(PERSON)), GRAMMARS.state_of(schema(PERSON))
    for token in text:
        allowed(one)
        assert one.push(token)
        assert other.push(token)
    assert allowed(one) == allowed(other)
