"""The conditional denoiser: patches, blocks, output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sit_vit5.config.presets import Backbone
from sit_vit5.models.block import Block
from sit_vit5.models.layers import (
    TOKEN_NORMS,
    Conditioning,
    Linear,
    Modulation,
    PatchEmbed,
    resize_positions,
    sincos_positions,
    unpatchify,
)
from sit_vit5.models.rope import RopeTables
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.precision import at_least_fp32, no_autocast


class Head(nn.Module):
    """adaLN norm and a zero-initialised linear layer from tokens to a prediction."""

    def __init__(self, backbone: Backbone, out_channels: int):
        super().__init__()
        self.norm = TOKEN_NORMS[backbone.recipe.norm](backbone.width, affine=False)
        self.modulation = Modulation(backbone.width, 2)
        self.linear = Linear(backbone.width, backbone.patch_size**2 * out_channels)
        for linear in (self.modulation.linear, self.linear):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """x: (B, N, D); c: conditioning (B, D). Gives (B, N, p * p * C)."""
        return _output(x, c, self.norm, self.modulation, self.linear)


class Denoiser(nn.Module):
    """Prediction at (x_t, t, labels) by a transformer after `backbone`.

    input_size: (h, w) of the latents it is trained at; other sizes divisible by the patch run with
    rotary tables of their own grid and resampled positions. num_classes 0: unconditional.
    out_channels: in_channels if None; an official DiT predicts twice as many (noise and variance).
    timesteps: 0, or how many diffusion steps an official DiT knows: it reads t as their number,
    timesteps * (1 - t) - 1, from timesteps - 1 at t = 0 down to 0.
    heads: further predictions, each from the tokens after a block (1 to depth), by name.
    activation_checkpointing: set it to keep only the blocks' inputs for the backward pass.
    """

    activation_checkpointing = False

    def __init__(
        self,
        backbone: Backbone,
        *,
        in_channels: int,
        input_size: tuple[int, int],
        num_classes: int,
        out_channels: int | None = None,
        timesteps: int = 0,
        heads: Mapping[str, int] | None = None,
    ):
        super().__init__()
        if num_classes < 0 or in_channels < 1:
            raise UserError(
                f"num_classes {num_classes} must be >= 0, in_channels {in_channels} >= 1"
            )
        self.backbone = backbone
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.input_size, self.timesteps = tuple(input_size), timesteps
        self.num_classes = num_classes
        width, recipe = backbone.width, backbone.recipe

        self.patch_embed = PatchEmbed(in_channels, width, backbone.patch_size)
        self.positions = self._build_positions()
        if recipe.registers:
            self.registers = nn.Parameter(torch.zeros(recipe.registers, width))
        self.conditioning = Conditioning(width, num_classes)
        self.blocks = nn.ModuleList(
            Block(width, backbone.heads, backbone.mlp_ratio, recipe) for _ in range(backbone.depth)
        )
        self.final_norm = TOKEN_NORMS[recipe.norm](width, affine=False)
        self.final_modulation = Modulation(width, 2)
        self.final = Linear(width, backbone.patch_size**2 * self.out_channels)
        self.head_blocks = dict(heads or {})
        for name, block in self.head_blocks.items():
            if not 1 <= block <= backbone.depth:
                raise UserError(f"head {name} reads block {block} of 1 to {backbone.depth}")
        self.rope = RopeTables(backbone)
        self.reset_parameters()
        if self.head_blocks:  # last: they leave the other initial weights as they are
            self.heads = nn.ModuleDict(
                {name: Head(backbone, self.out_channels) for name in self.head_blocks}
            )

    @property
    def null_label(self) -> int | None:
        """Label of "no class"; None for an unconditional model."""
        return self.num_classes or None

    def forward(
        self,
        x_t: Tensor,
        t: Tensor,
        labels: Tensor | None = None,
        taps: Sequence[int | str] = (),
    ) -> Tensor | tuple[Tensor, dict[int | str, Tensor]]:
        """Prediction (B, out_channels, h, w) in fp32; with taps, also a dict of what they name.

        x_t: (B, C, h, w), h and w divisible by the patch; t: (B,) in [0, 1]; labels: (B,) in
        0..num_classes, the last being the null label; not read by an unconditional model.
        taps: numbers of blocks (1 to depth), which give their patch tokens (B, N, D), and names of
        heads, which give their predictions.
        """
        grid = self.backbone.grid(x_t.shape[-2:])
        patches = grid[0] * grid[1]
        x = at_least_fp32(self.patch_embed(x_t))  # (B, N, D); what the blocks add to stays fp32
        if self.positions is not None:
            x = x + self._positions_on(grid)
        if self.backbone.recipe.registers:
            x = torch.cat([x, self.registers.expand(len(x), -1, -1)], dim=1)
        if self.timesteps:
            t = self.timesteps * (1 - t) - 1
        c = self.conditioning(t, labels)  # (B, D)
        rope = self.rope(grid, x.device)
        tokens: dict[int, Tensor] = {}
        wanted = {self.head_blocks.get(tap, tap) for tap in taps}
        for number, block in enumerate(self.blocks, start=1):
            x = self._run(block, x, c, rope)
            if number in wanted:
                tokens[number] = x[:, :patches]
        x = _output(x[:, :patches], c, self.final_norm, self.final_modulation, self.final)
        prediction = unpatchify(x, grid, self.backbone.patch_size)
        if not taps:
            return prediction
        return prediction, {tap: self._tapped(tap, tokens, c, grid) for tap in taps}

    def _tapped(
        self, tap: int | str, tokens: dict[int, Tensor], c: Tensor, grid: tuple[int, int]
    ) -> Tensor:
        """The tokens after a block, or the prediction of a head."""
        if not isinstance(tap, str):
            return tokens[tap]
        x = self.heads[tap](tokens[self.head_blocks[tap]], c)
        return unpatchify(x, grid, self.backbone.patch_size)

    def _run(self, block: Block, x: Tensor, c: Tensor, rope: Tensor | None) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, c, rope, use_reentrant=False)
        return block(x, c, rope)

    def _build_positions(self) -> nn.Parameter | None:
        grid = self.backbone.grid(self.input_size)
        kind = self.backbone.recipe.position
        if kind == "none":
            return None
        table = torch.empty(grid[0] * grid[1], self.backbone.width)
        # The fixed table is a parameter without gradient, as in DiT: it is counted and saved.
        return nn.Parameter(table, requires_grad=kind == "learned")

    def _positions_on(self, grid: tuple[int, int]) -> Tensor:
        own = self.backbone.grid(self.input_size)
        if grid == own:
            return self.positions
        if self.backbone.recipe.position == "sincos":
            return sincos_positions(grid, self.backbone.width).to(self.positions.device)
        return resize_positions(self.positions, own, grid)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """SiT's initialisation: Xavier matrices, N(0, 0.02) embeddings, zero modulation and output.

        Registers get N(0, 0.02) and learned positions start from the sin-cos table.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.conditioning.time_in.weight, std=0.02)
        nn.init.normal_(self.conditioning.time_out.weight, std=0.02)
        if self.conditioning.labels is not None:
            nn.init.normal_(self.conditioning.labels.weight, std=0.02)
        if self.backbone.recipe.registers:
            nn.init.normal_(self.registers, std=0.02)
        if self.positions is not None and not self.positions.is_meta:
            table = sincos_positions(self.backbone.grid(self.input_size), self.backbone.width)
            self.positions.copy_(table)
        zeroed = [block.modulation for block in self.blocks] + [self.final_modulation]
        for linear in [modulation.linear for modulation in zeroed] + [self.final]:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)


def _output(
    x: Tensor, c: Tensor, norm: nn.Module, modulation: Modulation, linear: Linear
) -> Tensor:
    """Tokens (B, N, D) to the pixels of their patches, (B, N, p * p * C)."""
    shift, scale = modulation(c)
    # fp32: the output layer costs nothing, and bf16 would round every prediction to 8 bits.
    with no_autocast(x.device):
        return linear(norm(x.float(), shift, scale))


def check_labels(labels: Tensor | list[int], num_classes: int) -> None:
    """Refuses labels outside 0..num_classes-1 on the host, where the message is readable."""
    for label in torch.as_tensor(labels).unique().tolist():
        if not 0 <= label < num_classes:
            raise UserError(f"label {label} is not in 0..{num_classes - 1}")
