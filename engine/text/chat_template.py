"""Chat templates. Owns: turning messages into the prompt text a model was trained on.

Templates come with model files, so they run in Jinja's immutable sandbox: no attribute access to internals, no writes.
What they make is bounded, too: products and formats that would fill the memory are refused, and so is an endless text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.runtime
import jinja2.sandbox

#: For tokenizers that come without one: readable, and nobody was trained on it.
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


#: Characters of one prompt, and of one product or format within it: several times the largest request body.
MAX_CHARS: Final = 16 * 1024 * 1024
#: A power beyond this is no part of a prompt.
_MAX_POWER_BITS: Final = 4096
_WIDE_FORMAT: Final = re.compile(r"\d{5,}|\*")


class ChatTemplateError(ValueError):
    """The template refused these messages, or does not work. Caused by the request or the model, not by the engine."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what an operator may make."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of a template."""
        if operator == "*":
            sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
            is_text = any(hasattr(side, "__len__") for side in (left, right))
            if is_text and all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > MAX_CHARS:
                raise jinja2.exceptions.SecurityError("a product without bound")
        elif operator == "**":
            # Integers alone: floats end in an overflow by themselves.
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
                raise jinja2.exceptions.SecurityError("a power without bound")
        elif isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise jinja2.exceptions.SecurityError("a format without bound")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile `source`; raises ChatTemplateError when it is not a template."""
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # prompts are plain text: escaping "<" would change what the model reads
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt text that ends where the assistant begins. `messages` hold `role` and `content`."""
        try:
            pieces, size = [], 0
            messages = [dict(message) for message in messages]
            for piece in self._template.generate(messages=messages, add_generation_prompt=True, **self._special):
                size += len(piece)
                if size > MAX_CHARS:
                    raise ChatTemplateError(f"the model's chat template makes more than {MAX_CHARS} characters of them")
                pieces.append(piece)
            return "".join(pieces)
        except ChatTemplateError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            KeyError,
            ValueError,
            ArithmeticError,
            LookupError,
            MemoryError,
        ) as error:
            # The message stays out: it may quote what the client wrote.
            raise ChatTemplateError(
                f"the model's chat template failed on these messages ({type(error).__name__})"
            ) from error


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
