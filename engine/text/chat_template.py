"""Chat templates. Owns: turning messages into the prompt text a model was trained on.

Templates come with model files, so they run in Jinja's immutable sandbox: no attribute access to internals, no writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NoReturn

import jinja2
import jinja2.sandbox

#: For tokenizers that come without one: readable, and nobody was trained on it.
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class ChatTemplateError(ValueError):
    """The template refused these messages, or does not work. Caused by the request or the model, not by the engine."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile `source`; raises ChatTemplateError when it is not a template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special
            )
        except ChatTemplateError:
            raise
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, ArithmeticError, LookupError) as error:
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
