"""The cookbook's questions. Owns: ten questions about a run, each as SQL for DuckDB over the Parquet tables.

Times are taken from `utc` or from nanoseconds of one engine's clock; rows of several engines may lie in one folder, so
joins name `engine_id`.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Recipe(NamedTuple):
    """One question, how its answer is read, and the query."""

    question: str
    reading: str
    sql: str


RECIPES: Final[tuple[Recipe, ...]] = (
    Recipe(
        "Which limit held back most request-seconds, hour by hour?",
        "Stretches are cut at the full hour. `order` means: the pass ended before this request was looked at; `reason` "
        "says what ended it, so that is the limit to lift.",
        """
WITH hours AS (
    SELECT DISTINCT engine_id, date_trunc('hour', utc) AS hour FROM steps),
spans AS (
    SELECT engine_id, hour, epoch_ns(hour) - wall_ns + t_ns AS from_ns, from_ns + 3_600_000_000_000 AS until_ns
    FROM hours JOIN engines USING (engine_id))
SELECT strftime(hour, '%Y-%m-%d %H:00') AS hour, blocker, reason,
       round(sum(least(end_ns, until_ns) - greatest(start_ns, from_ns)) / 1e9, 2) AS request_s,
       count(DISTINCT rid) AS requests
FROM waits JOIN spans USING (engine_id)
WHERE end_ns > from_ns AND start_ns < until_ns
GROUP BY ALL
ORDER BY hour, request_s DESC, blocker, reason;""",
    ),
    Recipe(
        "Which requests were overtaken most, and how long did they wait?",
        "`overtaken`: passes that computed prompt of later arrivals first. Many with a large `uncached` prompt point "
        "at the policy; `max_overtakes` bounds it.",
        """
SELECT a.rid, max(a.times_passed_over) AS overtaken, max(l.prompt_len) AS prompt,
       max(l.prompt_len - l.cached_len) AS uncached,
       round(max(l.admitted_ns - l.arrived_ns) / 1e6, 1) AS queue_ms
FROM admissions a JOIN lives l USING (engine_id, rid)
GROUP BY a.rid
HAVING overtaken > 0
ORDER BY overtaken DESC, queue_ms DESC
LIMIT 5;""",
    ),
    Recipe(
        "How much of the p99 time to first token is queue?",
        "Of the requests at and above the 99th percentile, beside all: the mean of each part of TTFT. The parts add up "
        "to it exactly.",
        """
WITH timed AS (
    SELECT *, ttft_ns >= (SELECT quantile_disc(ttft_ns, 0.99) FROM lives) AS is_slow
    FROM lives WHERE ttft_ns IS NOT NULL)
SELECT CASE WHEN is_slow THEN 'p99 and above' ELSE 'others' END AS who, count(*) AS requests,
       round(avg(ttft_ns) / 1e6, 1) AS ttft_ms,
       round(100 * sum(ttft_queue_ns) / sum(ttft_ns), 1) AS queue_pct,
       round(100 * sum(ttft_chunk_forward_ns) / sum(ttft_ns), 1) AS forward_pct,
       round(100 * sum(ttft_between_chunks_ns) / sum(ttft_ns), 1) AS between_pct,
       round(100 * sum(ttft_intake_ns + ttft_prepare_ns + ttft_commit_ns + ttft_emit_ns) / sum(ttft_ns), 1) AS rest_pct
FROM timed GROUP BY is_slow ORDER BY is_slow DESC;""",
    ),
    Recipe(
        "What did retractions cost?",
        "`lost`: tokens whose K/V was given up; `recomputed`: tokens that the retracted requests computed again "
        "afterwards (what the cache still had is the difference); `back_ms`: from the push-back to the next token.",
        """
SELECT r.cause, count(*) AS retractions, sum(r.lost_tokens) AS lost,
       sum((SELECT sum(extend_len) FROM step_rows s
            WHERE s.engine_id = r.engine_id AND s.rid = r.rid AND s.role = 'prefill' AND s.step > r.step
              AND s.step < coalesce((SELECT min(n.step) FROM retractions n
                                     WHERE n.engine_id = r.engine_id AND n.rid = r.rid AND n.step > r.step),
                                    9_223_372_036_854_775_807))) AS recomputed,
       round(avg((SELECT min(token_ns) FROM step_rows s
                  WHERE s.engine_id = r.engine_id AND s.rid = r.rid AND s.step > r.step) - r.t_ns) / 1e6, 1) AS back_ms
FROM retractions r
GROUP BY r.cause ORDER BY retractions DESC;""",
    ),
    Recipe(
        "Which ledger ended prefill passes, minute by minute?",
        "`queue_end` is the good end: everyone was looked at. `full_flag_set` repeats an earlier refusal without "
        "looking again.",
        """
SELECT strftime(date_trunc('minute', utc), '%H:%M') AS minute, pass_stopped_by AS ended_by,
       count(*) AS passes, round(avg(num_waiting), 1) AS waiting
FROM steps
WHERE pass_stopped_by IS NOT NULL
GROUP BY minute, ended_by
ORDER BY minute, passes DESC;""",
    ),
    Recipe(
        "How many prompt tokens were cut off by the chunk, and by the step's compute budget?",
        "Of admitted pieces: what was asked for and not given in that step. The smaller of the two ledgers cut.",
        """
SELECT CASE WHEN rem_chunk_before <= rem_input_before THEN 'chunk' ELSE 'compute' END AS cut_by,
       is_continuation, count(*) AS pieces, sum(selected_extend) AS given,
       sum(candidate_extend - selected_extend) AS put_off
FROM admissions
WHERE selected_extend > 0 AND is_chunked
GROUP BY cut_by, is_continuation
ORDER BY put_off DESC;""",
    ),
    Recipe(
        "What share of prompts came from the cache, by length?",
        "First admissions only: what a request finds again after a retraction is not a hit.",
        """
SELECT 100 * (prompt_len // 100) AS prompt_from, count(*) AS requests, sum(prompt_len) AS tokens,
       sum(cached_len) AS cached, round(100 * sum(cached_len) / sum(prompt_len), 1) AS hit_pct
FROM lives
WHERE cached_len IS NOT NULL
GROUP BY prompt_from ORDER BY prompt_from;""",
    ),
    Recipe(
        "In which kind of step do late tokens come?",
        "A token is late when the one before it is more than twice the run's median gap away. `mixed`: a piece of a "
        "prompt ran beside it.",
        """
WITH gaps AS (
    SELECT engine_id, step, rid, token_ns - lag(token_ns) OVER (PARTITION BY engine_id, rid ORDER BY token_ns) AS gap_ns
    FROM step_rows WHERE token_ns IS NOT NULL),
usual AS (
    SELECT median(gap_ns) AS usual_ns FROM gaps)
SELECT kind, count(*) AS tokens, count(*) FILTER (gap_ns > 2 * usual_ns) AS late,
       round(100 * count(*) FILTER (gap_ns > 2 * usual_ns) / count(*), 1) AS late_pct,
       round(median(gap_ns) / 1e6, 1) AS median_ms, round(max(gap_ns) / 1e6, 1) AS worst_ms
FROM gaps JOIN steps USING (engine_id, step), usual
WHERE gap_ns IS NOT NULL
GROUP BY kind ORDER BY late DESC;""",
    ),
    Recipe(
        "Who held most pages when K/V memory was scarcest?",
        "The first step with the fewest pages that are free or can be evicted. A page belongs to whoever got it last "
        "before: a request by its row, or a node of the prefix tree.",
        """
WITH worst AS (
    SELECT engine_id, step, seq FROM steps ORDER BY pages_free + pages_evictable, seq LIMIT 1),
moved AS (
    SELECT m.engine_id, unnest(page_ids) AS page, owner, m.seq
    FROM page_moves m JOIN worst w ON m.engine_id = w.engine_id AND m.seq <= w.seq),
held AS (
    SELECT engine_id, arg_max(owner, seq) AS owner FROM moved GROUP BY engine_id, page),
rows AS (
    SELECT t.engine_id, 'r:' || t."row" AS owner, arg_max(t.rid, t.seq) AS rid
    FROM transitions t JOIN worst w ON t.engine_id = w.engine_id AND t.seq <= w.seq
    WHERE t.cause = 'admit' GROUP BY t.engine_id, t."row")
SELECT (SELECT step FROM worst) AS step,
       coalesce(rid, CASE owner WHEN '' THEN 'free' ELSE 'cache ' || owner END) AS who, count(*) AS pages
FROM held LEFT JOIN rows USING (engine_id, owner)
GROUP BY who ORDER BY pages DESC, who LIMIT 6;""",
    ),
    Recipe(
        "How honest was the reservation: what was promised against what was used?",
        "Per decode step: growth promised to the running requests, and the tokens that they went on to produce, by the "
        "ratio in force. In `short` steps they produced more than was promised: retractions come from those.",
        """
WITH tokens AS (
    SELECT engine_id, step, role,
           row_number() OVER (PARTITION BY engine_id, rid ORDER BY token_ns DESC) - 1 AS still_to_come
    FROM step_rows WHERE token_ns IS NOT NULL),
used AS (
    SELECT engine_id, step, sum(still_to_come) AS used FROM tokens WHERE role = 'decode' GROUP BY engine_id, step)
SELECT floor(new_token_ratio * 20) / 20 AS ratio_from, count(*) AS steps,
       round(avg(promised_tokens), 1) AS promised, round(avg(used), 1) AS used,
       round(avg(used) / nullif(avg(promised_tokens), 0), 1) AS used_per_promised,
       count(*) FILTER (used > promised_tokens) AS short
FROM steps JOIN used USING (engine_id, step)
GROUP BY ratio_from ORDER BY ratio_from;""",
    ),
)
