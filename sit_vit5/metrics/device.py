"""Where features and distances are computed."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """The process's CUDA device if there is one, else the CPU: both compute true fp32 and fp64."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
