"""The oracle of these tests lives in `bench/accuracy.py`: one definition for the printed figures and for the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

# Tiny tensors gain nothing from more threads, and waiting ones cost much on a machine that others use too.
torch.set_num_threads(1)
