"""SiT-B/2 and its training step as one writes them from timm's parts, as a peer to measure against.

What SiT's and DiT's released code does, in its cost: unfused attention bias and norms, AdamW and
averages tensor by tensor, autocast around everything.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, PATCH, SIDE, CHANNELS, CLASSES = 768, 12, 12, 2, 32, 4, 1000


class PlainBlock(nn.Module):
    """LayerNorm, adaLN, timm's attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention = Attention(WIDTH, num_heads=HEADS, qkv_bias=True)
        self.mlp = Mlp(WIDTH, 4 * WIDTH, act_layer=partial(nn.GELU, approximate="tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """x: (B, N, D); c: (B, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class PlainSiT(nn.Module):
    """The whole network, without the sine of t: a linear layer of t costs the same."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = PatchEmbed(SIDE, PATCH, CHANNELS, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2, WIDTH))
        self.time = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.final = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """x: (B, 4, 32, 32); t, labels: (B,) to patches (B, N, 16)."""
        x = self.patches(x) + self.position
        c = self.time(t[:, None].expand(-1, 256)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, -1)
        return self.final(self.norm(x) * (1 + scale) + shift)


def plain_step(batch: int, precision: str, device: str) -> Callable[[], None]:
    """A training step on its own latents: loss, AdamW at its defaults, averages in a loop."""
    model = PlainSiT().to(device)
    ema = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    latents = torch.randn(batch, CHANNELS, SIDE, SIDE, device=device)
    labels = torch.randint(0, CLASSES, (batch,), device=device)

    def step() -> None:
        noise, t = torch.randn_like(latents), torch.rand(batch, device=device)
        x_t = t[:, None, None, None] * latents + (1 - t)[:, None, None, None] * noise
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            prediction = model(x_t, t, labels)
            target = (latents - noise).reshape_as(prediction)
            loss = (prediction - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
                average.mul_(0.9999).add_(weight, alpha=1 - 0.9999)

    return step
