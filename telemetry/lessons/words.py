"""Words. Owns: titles and reasons in English and Chinese, and how a sentence of `sentences.toml` gets its numbers.

Codes of the engine (reasons, results, ledgers, states, policies) are not translated: they are what logs, metrics and
records say. What they mean is said beside them, in both languages.
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from typing import Final

from engine.scheduler.decision import Reason
from telemetry.lessons.moment import Kind, Text

#: What each kind of moment is called.
KIND_TITLES: Final[dict[Kind, Text]] = {
    "start": Text("The situation", "初始状态"),
    "arrive": Text("Arrival", "请求到达"),
    "order": Text("Order of the queue", "队列排序"),
    "open": Text("The ledgers open", "账本开账"),
    "skip": Text("No pass", "不做准入"),
    "look": Text("Candidate", "候选"),
    "continuation": Text("Continuation", "续算"),
    "admission": Text("Admitted", "准入"),
    "refusal": Text("Refused", "拒绝"),
    "end": Text("The pass ends", "本轮结束"),
    "growth": Text("Growth", "增长"),
    "eviction": Text("Eviction", "驱逐"),
    "retraction": Text("Retraction", "撤回"),
    "preemption": Text("Preemption", "抢占"),
    "commit": Text("Commit", "提交"),
    "result": Text("Result", "结果"),
    "quiet": Text("Quiet decode steps", "平稳解码"),
}

#: What a reason says, short enough for an answer to a question.
REASONS: Final[dict[Reason, Text]] = {
    Reason.ADMITTED_WHOLE: Text("admitted whole", "整段准入"),
    Reason.ADMITTED_FIRST_CHUNK: Text("admitted, first chunk only", "只准入第一块"),
    Reason.ADMITTED_NEXT_CHUNK: Text("a further chunk, not the last", "再算一块，但不是最后一块"),
    Reason.ADMITTED_LAST_CHUNK: Text("the last chunk: its prompt ends", "最后一块：提示词到此算完"),
    Reason.KV_NOW_EXHAUSTED: Text("no pages for it at this moment", "此刻没有可用的页"),
    Reason.KV_TOTAL_EXHAUSTED: Text(
        "its future does not fit beside what is promised", "它的将来放不进已承诺之外的空间"
    ),
    Reason.PREFILL_MAX_REACHED: Text("the batch holds prefill_max_requests already", "批次已达 prefill_max_requests"),
    Reason.FULL_FLAG_SET: Text("the full flag is set: nobody is looked at", "满标志已置位：谁也不看"),
    Reason.DELAYED: Text("an admission delay holds it back", "准入被有意推迟"),
    Reason.PARKED_BY_GUARD: Text("a guard parks the continuation", "保护机制让续算暂停"),
    Reason.PREEMPTED_FOR: Text("it gives way to a more important one", "为更重要的请求让路"),
    Reason.COMPUTE_EXHAUSTED: Text("the input ledger is spent", "输入账本已用尽"),
    Reason.CHUNK_EXHAUSTED: Text("the chunk ledger is spent", "分块账本已用尽"),
    Reason.CHUNK_BELOW_PAGE: Text("what is left of the chunk is less than a page", "分块余量不足一页"),
    Reason.CHUNK_SLOT_TAKEN: Text("another prompt is being cut already", "已有另一个提示词正在分块"),
    Reason.ROWS_EXHAUSTED: Text("max_running_requests hold memory already", "已有 max_running_requests 个请求占用内存"),
    Reason.SHARES_COLD_PREFIX: Text("it shares a cold prefix with one ahead", "与前面的请求共享尚未缓存的前缀"),
    Reason.NEVER_FITS: Text("it is larger than the empty pool", "比空的页池还大"),
    Reason.QUEUE_END: Text("everyone was looked at", "队列已全部看完"),
}


def _read() -> dict[str, Text]:
    content = (files("telemetry.lessons") / "sentences.toml").read_text(encoding="utf-8")
    return {key: Text(texts["en"], texts["zh-CN"]) for key, texts in tomllib.loads(content).items()}


_SENTENCES: Final = _read()

#: "1 requests" in an English sentence.
_ONE: Final = re.compile(r"\b1 (request|time|token|page|decode row|output|row)s\b")


def say(key: str, /, **values: object) -> Text:
    """A sentence; a value that is a Text is said in the sentence's own language."""
    english, chinese = _SENTENCES[key]
    return Text(_ONE.sub(r"1 \1", english.format(**_in("en", values))), chinese.format(**_in("zh-CN", values)))


def _in(lang: str, values: dict[str, object]) -> dict[str, object]:
    return {name: value.say(lang) if isinstance(value, Text) else value for name, value in values.items()}


def listed(parts: list[Text] | list[str]) -> Text:
    """Names or clauses, one after another."""
    texts = [part if isinstance(part, Text) else Text(part, part) for part in parts]
    return Text(", ".join(text.en for text in texts), "、".join(text.zh for text in texts))


def number(value: float) -> str:
    """A count, or a fraction with at most two places."""
    if float(value).is_integer():
        return str(int(value))
    return f"{value:.2f}".rstrip("0").rstrip(".")
