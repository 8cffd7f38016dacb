"""Bucket bounds. Owns: those of `/metrics`, and those of other views of the same histograms, in exposed units.

A histogram is kept with the union of the bounds of all views that show it; each view sums neighbouring cells down to
its own, which is exact because its bounds are a subset.
"""

from __future__ import annotations

from typing import Final

SEC_REQ: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 200.0, 320.0, 640.0, 900.0),
)
SEC_STEP: Final = (
    *(5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: Deciding a step takes microseconds.
SEC_PLAN: Final = (1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
TOK_LAT: Final = (
    *(0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
)
TOKS: Final = (
    *(1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0),
    *(1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 114688.0, 131072.0),
)
#: Of the three server histograms of OpenTelemetry's conventions for generative AI.
GENAI_DURATION: Final = tuple(0.01 * 2**power for power in range(14))
GENAI_TTFT: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GENAI_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
#: Of the histograms that an SGLang server shows.
SGLANG_TTFT: Final = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
    *(10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
SGLANG_E2E: Final = (*SGLANG_TTFT, 600.0, 1200.0, 1800.0, 2400.0)
SGLANG_TOKEN: Final = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
SGLANG_QUEUE: Final = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0),
    *(1000.0, 1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0),
)
CNT: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0)
RETR: Final = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)
