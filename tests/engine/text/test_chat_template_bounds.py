"""Chat templates are code of a model file: what they can make is bounded."""

from __future__ import annotations

import tracemalloc

import pytest

from engine.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ messages * 10 ** 9 }}",
        "{{ 9 ** 99999 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{% for a in range(9999) %}{% for b in range(999) %}{{ messages[0]['content'] * 999 }}{% endfor %}{% endfor %}",
        "{% for a in range(1000000) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_without_bound_is_refused_at_little_cost(source: str) -> None:
    template = ChatTemplate(source)
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            template.render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 512 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '-' * 20 }}", "-" * 20),
        ("{{ 3 * 4 }} {{ 2 ** 10 }} {{ 7 % 4 }}", "12 1024 3"),
        ("{{ '%s is %d' % (messages[0]['role'], 3) }}", "user is 3"),
        ("{{ messages[0]['content'] }}", "hello"),
    ],
)
def test_what_templates_do_still_works(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == expected
