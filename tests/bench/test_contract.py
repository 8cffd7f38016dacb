"""The server against its own OpenAPI document: a thousand drawn requests, answered as documented."""

from __future__ import annotations

from pathlib import Path

import pytest
from schemathesis.generation import GenerationMode

from bench.contract import FLAGS, modes_of, run
from bench.tiny_server import tiny_server


def test_every_answer_is_as_documented_and_none_is_a_server_error(tmp_path: Path) -> None:
    with tiny_server(tmp_path, FLAGS) as server:
        report = run(server.url, cases=1000)
        held = server.until_nothing_is_held(files=1 << 20)
    assert report.faults == {}
    assert report.cases >= 1000
    statuses = {status for _, status in report.statuses}
    assert statuses >= {200, 400, 404}, "the cases went deep enough to be answered"
    assert statuses < set(range(200, 500))
    assert (held.is_nothing, held.violations, held.telemetry_errors) == (True, 0, 0)


@pytest.mark.parametrize(
    ("share", "valid", "invalid"), [(-3, 1, 1), (0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1), (20, 14, 6)]
)
def test_an_operation_gets_a_case_of_each_kind_however_few_there_are(share: int, valid: int, invalid: int) -> None:
    assert modes_of(share) == ((GenerationMode.POSITIVE, valid), (GenerationMode.NEGATIVE, invalid))
