"""The linear layer of all networks here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def to_weights(x: Tensor, weight: Tensor) -> Tensor:
    """x in the dtype of bf16 or fp16 weights: what the blocks add to is fp32 all the same."""
    return x.to(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Linear):
    """`nn.Linear` that also takes fp32 input where a network was loaded in bf16 or fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(to_weights(x, self.weight), self.weight, self.bias)
