"""Intake. Owns: the way from a validated body to engine requests: templates, tokens, limits, sampling parameters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from engine.llm_engine import EngineRequest
from engine.sampling_params import GrammarSpec, SamplingParams
from engine.server.api_errors import ApiError, invalid, too_long
from engine.server.choices import Choice
from engine.server.constraints import grammar_of
from engine.server.schemas import ChatCompletionBody, CompletionBody, GenerationBody
from engine.server.trace_context import RequestContext
from engine.text.chat_template import ChatTemplateError
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer

#: Output tokens of a completion that does not say how many: OpenAI's default.
COMPLETION_MAX_TOKENS: Final = 16
#: Below this a temperature is argmax: dividing logits by it gains nothing but overflow.
_GREEDY_BELOW: Final = 1e-5
#: Longer texts, all prompts of a request together, are tokenized on another thread.
_INLINE_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server serves. Units: tokens; `created` is Unix seconds."""

    name: str
    max_context_tokens: int
    vocab_size: int
    created: int = 0


@dataclass(frozen=True, slots=True)
class Intake:
    """Engine requests of one HTTP request, and the choices they will fill; both in the same order."""

    response_id: str
    requests: tuple[EngineRequest, ...]
    choices: tuple[Choice, ...]
    choices_per_prompt: int


def num_choices(body: GenerationBody) -> int:
    """Engine requests that `body` asks for."""
    prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    return prompts * (body.n or 1)


async def prompts_of(body: GenerationBody, model: ServedModel, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids of each prompt, checked against the vocabulary. Raises ApiError 400."""
    if isinstance(body, ChatCompletionBody):
        messages = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in body.messages
        ]
        try:
            text = tokenizer.apply_chat_template(messages)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages", "chat_template_refused") from None
        inline = len(text) <= _INLINE_CHARS
        return [await _encode(tokenizer, text, add_special=False, field="messages", inline=inline)]
    if not isinstance(body, CompletionBody):
        raise TypeError(f"no prompts in {type(body).__name__}")
    inline = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)) <= _INLINE_CHARS
    prompts: list[tuple[int, ...]] = []
    for index, prompt in enumerate(body.prompt):
        if isinstance(prompt, str):
            prompts.append(await _encode(tokenizer, prompt, add_special=True, field="prompt", inline=inline))
        elif min(prompt) < 0 or max(prompt) >= model.vocab_size:
            raise invalid(f"prompt {index} holds a token id outside 0..{model.vocab_size - 1}", "prompt")
        else:
            prompts.append(tuple(prompt))
    return prompts


async def take_in(
    body: GenerationBody,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
    context: RequestContext,
    accepted_ns: int,
) -> Intake:
    """Engine requests and choices for `body`. Raises ApiError: 400 for what does not fit, 503 for a late grammar."""
    _check_cross_fields(body, model)
    constraint = await grammar_of(body, grammars)
    grammar, compiled = (None, None) if constraint is None else constraint
    prompts = await prompts_of(body, model, tokenizer)
    is_chat = isinstance(body, ChatCompletionBody)
    per_prompt = body.n or 1
    response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{context.internal_id}"
    requests: list[EngineRequest] = []
    choices: list[Choice] = []
    for prompt in prompts:
        max_new = _max_new_tokens(body, len(prompt), model.max_context_tokens, is_chat)
        for sample in range(per_prompt):
            index = len(choices)
            rid = response_id if len(prompts) * per_prompt == 1 else f"{response_id}.{index}"
            params = sampling_params(body, max_new, sample, grammar)
            requests.append(
                EngineRequest(
                    rid=rid,
                    prompt_ids=prompt,
                    params=params,
                    grammar=None if compiled is None else compiled.begin(),
                    priority=body.priority,
                    routing_key=body.routing_key,
                    accepted_ns=accepted_ns,
                    trace_id=context.trace_id,
                    parent_span_id=context.parent_span_id,
                    trace_sampled=context.is_sampled,
                )
            )
            choices.append(
                Choice(
                    rid=rid,
                    index=index,
                    prompt_tokens=len(prompt),
                    params=params,
                    tokenizer=tokenizer,
                )
            )
    return Intake(response_id, tuple(requests), tuple(choices), per_prompt)


def sampling_params(
    body: GenerationBody, max_new_tokens: int, sample: int, grammar: GrammarSpec | None
) -> SamplingParams:
    """What `body` asks of the sampler for the `sample`-th choice of a prompt."""
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(0, body.top_k or 0),
        min_p=float(body.min_p or 0.0),
        repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in (body.logit_bias or {}).items()),
        seed=_seed(body.seed, sample),
        logprobs=_logprobs(body),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        min_new_tokens=body.min_tokens or 0,
        grammar=grammar,
    )


def _seed(seed: int | None, sample: int) -> int | None:
    """Each choice its own seed, the first the given one."""
    if seed is None or sample == 0:
        return seed
    digest = blake2b(b"%d:%d" % (seed, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatCompletionBody) and body.logprobs:
        return body.top_logprobs or 0
    return None


def _check_cross_fields(body: GenerationBody, model: ServedModel) -> None:
    """Fields that contradict each other, or the model."""
    if body.model != model.name:
        raise ApiError(
            404,
            f"the model {body.model[:100]!r} is not served here; {model.name!r} is",
            code="model_not_found",
            param="model",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for streams: it needs stream=true", "stream_options")
    first, second = body.max_tokens, body.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise invalid(f"max_tokens={first} and max_completion_tokens={second} say two things: give one", "max_tokens")
    if isinstance(body, ChatCompletionBody) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    for field, token_ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", map(int, body.logit_bias or ()))):
        for token_id in token_ids or ():
            if token_id >= model.vocab_size:
                raise invalid(f"{field}: {token_id} is outside 0..{model.vocab_size - 1}", field)


def _max_new_tokens(body: GenerationBody, prompt_len: int, limit: int, is_chat: bool) -> int:
    """Output tokens of one choice: as asked, or what fits."""
    param = "messages" if is_chat else "prompt"
    room = limit - prompt_len
    if room < 1:
        raise too_long(f"the prompt has {prompt_len} tokens; the context holds {limit}, output included", param)
    asked = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    if asked is None:
        asked = room if is_chat else min(COMPLETION_MAX_TOKENS, room)
    elif asked > room:
        raise too_long(
            f"the prompt has {prompt_len} tokens and max_tokens={asked}: together more than the context of {limit}",
            param,
        )
    if (body.min_tokens or 0) > asked:
        raise invalid(f"min_tokens={body.min_tokens} is more than the {asked} tokens that may be made", "min_tokens")
    return asked


async def _encode(tokenizer: Tokenizer, text: str, *, add_special: bool, field: str, inline: bool) -> tuple[int, ...]:
    if inline:
        ids = tokenizer.encode(text, add_special)
    else:
        ids = await asyncio.to_thread(tokenizer.encode, text, add_special)
    if not ids:
        raise invalid(f"{field} has no tokens", field)
    return tuple(ids)
