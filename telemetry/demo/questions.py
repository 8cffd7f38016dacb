"""Questions about passages. Owns: turning a row of the trace into a chat request whose answer can be read."""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from functools import cache
from typing import Final

from telemetry.demo.trace import DATA_DIR, Scale, TraceRow, scaled

#: Lengths of the trace on a small CPU: a median row becomes about 130 tokens in, 32 out.
CONTEXT: Final = Scale(divisor=8, low=48, high=320)
GENERATED: Final = Scale(divisor=4, low=12, high=64)

SYSTEM_PROMPT: Final = (
    "You help readers of old plays. You get a passage and one question about it. Answer in one or two short, plain"
    " sentences, in modern English, and use only what the passage says."
)
QUESTIONS: Final = (
    "What is this passage about?",
    "Who speaks in this passage?",
    "What is the mood of this passage?",
    "What does the first speaker want?",
    "What happens in this passage?",
    "Give this passage a title.",
)
#: Different passages; a small number, so that requests share prefixes as users of one document do.
NUM_PASSAGES: Final = 10
#: Of English verse under SmolLM2's tokenizer, measured on the shipped text.
_CHARS_PER_TOKEN: Final = 3.2
#: System prompt, template and question.
_FRAME_TOKENS: Final = 72


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """One chat request. `passage` and `question` are kept apart for showing them."""

    passage: str
    question: str
    max_tokens: int

    def messages(self) -> list[dict[str, str]]:
        """The conversation, shared parts first: requests about one passage share its tokens as a prefix."""
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"Passage:\n{self.passage}\n\nQuestion: {self.question}"},
        ]


@cache
def _passages() -> tuple[str, ...]:
    """NUM_PASSAGES stretches of text, each from the start of a speech, long enough for the longest context."""
    with gzip.open(DATA_DIR / "shakespeare.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    length = int(CONTEXT.high * _CHARS_PER_TOKEN)
    stride = (len(text) - length) // NUM_PASSAGES
    starts = (text.index("\n\n", number * stride) + 2 for number in range(NUM_PASSAGES))
    return tuple(text[start : start + length] for start in starts)


def question_of(row: TraceRow, number: int, seed: int) -> ChatQuestion:
    """The question that stands for row `number`: deterministic in its three arguments.

    The passage is as long as the scaled context asks, cut at a line's end; a few passages are asked about more often.
    """
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - a load, not a secret
    lengths = scaled(row, context=CONTEXT, generated=GENERATED)
    passages = _passages()
    # The smaller of two draws: early passages come up more often, as popular documents do.
    passage = passages[min(rng.randrange(NUM_PASSAGES), rng.randrange(NUM_PASSAGES))]
    wanted = int(max(lengths.context_tokens - _FRAME_TOKENS, 24) * _CHARS_PER_TOKEN)
    end = passage.find("\n", wanted)
    return ChatQuestion(
        passage=passage[: end if end >= 0 else wanted].strip(),
        question=rng.choice(QUESTIONS),
        max_tokens=lengths.generated_tokens,
    )
