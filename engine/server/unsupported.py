"""Unsupported fields. Owns: request fields of other servers that mean nothing here, and values that ask for nothing.

A field that would change the answer is refused, never ignored. A value that says "do not" is let through, because
client libraries and frameworks send it without being asked.
"""

from __future__ import annotations

import json
from typing import Any, Final

from engine.server.api_errors import ApiError

#: Field -> the values that ask for nothing. None (absent) always asks for nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # other inference servers
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_params": (),
    "documents": ([],),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "images": ([],),
    "input_embeds": (),
    "input_ids": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": (),
    "lora_path": (),
    "multi_modal_data": ({},),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (),
    "session_params": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def drop_neutral(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without unsupported fields that ask for nothing; raises ApiError 400 for one that asks for something."""
    kept = {}
    for name, value in body.items():
        neutral = NEUTRAL.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(_same(value, entry) for entry in neutral):
            raise ApiError(
                400,
                f"{name} is not supported by this server: leave it out" + _allowed(neutral),
                code="unsupported_parameter",
                param=name,
            )
    return kept


def _same(value: object, neutral: object) -> bool:
    """Equal, and not a bool where a number is meant."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _allowed(neutral: tuple[Any, ...]) -> str:
    """Which values change nothing, as JSON has them; what is left out or empty is not worth a word."""
    told = [json.dumps(value) for value in neutral if value not in ([], {}, "")]
    return f" (accepted without effect: {', '.join(told)})" if told else ""
