"""Tiny tensors gain nothing from more threads, and waiting ones cost much on a machine that others use too."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
