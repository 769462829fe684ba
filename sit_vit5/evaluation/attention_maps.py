"""Where tokens look, and which channels the gates let through. Numbers only; no files, no pictures.

A block adds scale * branch(x) to the tokens, channel by channel; scale is LayerScale's gamma, the
adaLN gate, or what the recipe makes of both. ViT-5 (Wang et al., 2026) calls it over-gating when
several such filters in series leave few channels. We know no threshold of theirs; ours: a channel
is suppressed where its |scale| is at most a fraction, by default 0.1, of the mean |scale| over the
channels of the same branch and block. Normally distributed scales around zero would give 6.4% at
0.1. A branch whose scales are all zero is suppressed wholly. The gate inside a SwiGLU acts on
hidden units, not on these channels, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sit_vit5.errors import UserError
from sit_vit5.models.layers import Attention

# Branch by its name in pictures -> the block's gate on it.
BRANCHES = {"attention": "gate1", "MLP": "gate2"}
DEFAULT_BLOCKS = 4


@dataclass(frozen=True)
class Tokens:
    """The sequence of a ViT-5: cls if there is one, patches row by row, registers."""

    cls: int
    grid: tuple[int, int]
    registers: int

    @property
    def patches(self) -> slice:
        """Where the patches stand."""
        return slice(self.cls, self.cls + self.grid[0] * self.grid[1])

    def queries(self) -> dict[str, slice]:
        """cls and each register; the mean over all tokens where there is neither."""
        named = {"cls": slice(0, 1)} if self.cls else {}
        first = self.patches.stop
        for number in range(self.registers):
            named[f"register {number}"] = slice(first + number, first + number + 1)
        return named or {"mean over queries": slice(None)}


@dataclass(frozen=True)
class PatchMap:
    """Attention of one query to the patches. weights: (rows, columns), their sum at most 1."""

    weights: Tensor

    @property
    def share(self) -> float:
        """Attention that falls on patches; the rest goes to cls and registers."""
        return self.weights.sum().item()

    @property
    def contrast(self) -> float:
        """Largest weight over the mean weight: 1 for a query that looks everywhere alike."""
        return (self.weights.max() / self.weights.mean()).item()


@dataclass(frozen=True)
class BranchGate:
    """One branch of one block. shares: suppressed channels (M,), one number per condition."""

    shares: Tensor
    mean_scale: float


def attention_weights(
    forward: Callable[[], object], blocks: nn.ModuleList, numbers: Sequence[int]
) -> dict[int, Tensor]:
    """The weights (B, K, N, N) of the numbered blocks during `forward()`."""
    found = {}
    with ExitStack() as hooks:
        for number in numbers:

            def record(attention: Attention, inputs: tuple, number: int = number) -> None:
                q, k, _ = attention.queries_keys_values(*inputs)
                found[number] = attention.weights(q, k)

            hooks.enter_context(blocks[number].attention.register_forward_pre_hook(record))
        forward()
    return found


def patch_maps(weights: Tensor, tokens: Tokens, *, head: int | None = None) -> dict[str, PatchMap]:
    """One map per query, of one head or the mean over heads. weights: (K, N, N)."""
    chosen = weights.mean(0) if head is None else weights[head]  # (N, N)
    if not chosen.isfinite().all():
        raise UserError("the attention is not finite; check the weights")
    return {
        name: PatchMap(chosen[place, tokens.patches].mean(0).unflatten(0, tokens.grid))
        for name, place in tokens.queries().items()
    }


def block_maps(
    forward: Callable[[], object],
    blocks: nn.ModuleList,
    tokens: Tokens,
    *,
    numbers: Sequence[int] = (),
    head: int | None = None,
) -> dict[int, dict[str, PatchMap]]:
    """The maps of the first image by block and query during `forward()`."""
    numbers = choose_blocks(numbers, len(blocks))
    heads = blocks[0].attention.heads
    if head is not None and not 0 <= head < heads:
        raise UserError(f"head {head} is not in 0..{heads - 1}")
    weights = attention_weights(forward, blocks, numbers)
    return {number: patch_maps(weights[number][0], tokens, head=head) for number in numbers}


def choose_blocks(wanted: Sequence[int], depth: int) -> list[int]:
    """The wanted numbers if they exist; by default some spread evenly, the last included."""
    for number in wanted:
        if not 0 <= number < depth:
            raise UserError(f"block {number} is not in 0..{depth - 1}")
    last = max(DEFAULT_BLOCKS - 1, 1)
    spread = {round(place * (depth - 1) / last) for place in range(DEFAULT_BLOCKS)}
    return list(wanted) or sorted(spread)


def channel_scales(blocks: nn.ModuleList, conditioning: Tensor | None) -> list[dict[str, Tensor]]:
    """What multiplies each channel of each branch: (M, D) per block and branch.

    conditioning: (M, D), or None for unconditional blocks (M = 1); (1, 1) where nothing scales.
    """
    found: list[dict[str, Tensor]] = [{} for _ in blocks]
    with ExitStack() as hooks:
        for block, scales in zip(blocks, found, strict=True):
            for branch, name in BRANCHES.items():

                def record(gate, inputs, scale, scales=scales, branch=branch) -> None:
                    del gate, inputs
                    scale = torch.ones(1) if scale is None else scale  # nothing scales
                    scales[branch] = torch.atleast_2d(scale).flatten(0, -2)

                hooks.enter_context(getattr(block, name).register_forward_hook(record))
        # The scales depend on the conditioning alone: one token is enough to run the gates.
        device, width = next(blocks.parameters()).device, blocks[0].attention.proj.in_features
        count = 1 if conditioning is None else len(conditioning)
        for block in blocks:
            block(torch.zeros(count, 1, width, device=device), conditioning, None)
    return found


def suppressed_share(scale: Tensor, fraction: float) -> Tensor:
    """Share of channels with |scale| at most `fraction` of the mean |scale|. (M, D) -> (M,)."""
    size = scale.abs()
    return (size <= fraction * size.mean(-1, keepdim=True)).float().mean(-1)


def branch_gates(
    blocks: nn.ModuleList, conditioning: Tensor | None, *, fraction: float
) -> list[dict[str, BranchGate]]:
    """Suppressed shares and mean |scale| of every branch of every block."""
    gates = []
    for scales in channel_scales(blocks, conditioning):
        if not all(scale.isfinite().all() for scale in scales.values()):
            raise UserError("the gates are not finite; check the weights")
        gates.append(
            {
                branch: BranchGate(suppressed_share(scale, fraction), scale.abs().mean().item())
                for branch, scale in scales.items()
            }
        )
    return gates
