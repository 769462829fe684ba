"""What a block is made of: ViT-5, its ablations, plain SiT, and the rivals. Imports no torch.

A rival is its block as published, carried over to a bidirectional vision block: its functions say
from where, and which features have no place there. For all of them:

- no causal mask, sliding window or cache: every patch sees every patch;
- grouped queries and mixtures of experts save memory of a decoder's cache and multiply parameters;
  here every model of a size has the same heads, and gated MLPs as many weights as ungated ones;
- rotation in 2D over the patch grid; bases chosen for contexts of 10^4 and more words (5e5, 1.5e5,
  1e6) become 10000 as in ViT-5 and VisionLLaMA;
- the epsilon of norms is 1e-6; in a denoiser, norms have no affine parameters: adaLN supplies them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

Theta = Annotated[float, Ge(1), Le(1e12)]


@dataclass(frozen=True)
class Recipe:
    """What a block is made of. The defaults are ViT-5's (Wang et al., 2026)."""

    norm: Literal["rms", "layer"] = "rms"
    """Token norm, without affine parameters because adaLN supplies them."""
    post_norm: bool = False
    """A second norm of each branch before it is added (Gemma3's sandwich)."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "clamped_swiglu"] = "gelu"
    """MLP: exact erf GELU, its tanh approximation of DiT and SiT, or a gated one."""
    mlp_bias: bool = True
    """Biases of the MLP's layers."""
    layer_scale: Literal["none", "product", "instead"] = "product"
    """LayerScale beside the adaLN gate: no gamma, gamma * gate, or gamma in the gate's place, where
    adaLN has no gates. Without adaLN, as in the classifier: gamma alone."""
    layer_scale_init: Annotated[float, Ge(-1000), Le(1000)] = 1e-4
    """Initial value of gamma (unit: 1; unused with layer_scale none)."""
    qk_norm: bool = True
    """RMS norm of queries and keys per head, with a weight, before the rotation."""
    qkv_bias: bool = False
    """Bias of the query, key and value projection."""
    key_bias: bool = True
    """Whether that bias has a part for the keys (unused without qkv_bias)."""
    proj_bias: bool = True
    """Bias of attention's output projection."""
    attention_sink: bool = False
    """A learned logit per head that takes attention away from all tokens (GPT-oss)."""
    position: Literal["learned", "sincos", "none"] = "learned"
    """Absolute position of the patches; learned starts from the sin-cos table."""
    rope_theta: Theta | None = 10000.0
    """Base of the 2D rotary frequencies of the patches; None: not rotated."""
    rope_extent: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Angle in radian of the fastest pair over a whole side, 0 in its middle; None: 1 per patch."""
    registers: Annotated[int, Ge(0), Le(4096)] = 4
    """Number of register tokens after the patches."""
    register_theta: Theta | None = 100.0
    """Base of the rotary frequencies of the registers' own square grid; None: not rotated."""

    @property
    def gated_mlp(self) -> bool:
        """Whether one half of the MLP's hidden channels filters the other."""
        return self.mlp in ("swiglu", "geglu", "clamped_swiglu")

    @property
    def modulation_vectors(self) -> int:
        """Vectors that adaLN gives a block: shift, scale and, if there is one, gate per branch."""
        return 4 if self.layer_scale == "instead" else 6


def successor(layer_scale: str, *, conditional: bool = True) -> str:
    """The present name of a `layer_scale` in a file.

    `sum`, gamma + gate, was `none` under another name, since the gate has a bias, into which
    `models.state_dict.fold_gammas` puts what gamma learned. Without adaLN it was gamma alone.
    """
    if layer_scale != "sum":
        return layer_scale
    return "none" if conditional else "product"


VIT5 = Recipe()

# The block of DiT (Peebles and Xie, 2023), which plain SiT (Ma et al., 2024) took over.
PLAIN = Recipe(
    norm="layer",
    mlp="gelu_tanh",
    layer_scale="none",
    qk_norm=False,
    qkv_bias=True,
    position="sincos",
    rope_theta=None,
    registers=0,
    register_theta=None,
)

# ViT-5 without one of its components (the paper's leave-one-out table), and its over-gating pair.
ABLATIONS: dict[str, Recipe] = {
    "no_layer_scale": replace(VIT5, layer_scale="none"),
    "no_rms_norm": replace(VIT5, norm="layer"),
    "no_ape": replace(VIT5, position="none"),
    "no_rope": replace(VIT5, rope_theta=None),
    "no_registers": replace(VIT5, registers=0, register_theta=None),
    "no_register_rope": replace(VIT5, register_theta=None),
    "no_qk_norm": replace(VIT5, qk_norm=False),
    "qkv_bias": replace(VIT5, qkv_bias=True),
    "swiglu": replace(VIT5, mlp="swiglu"),
    "swiglu_no_layer_scale": replace(VIT5, mlp="swiglu", layer_scale="none"),
}


def deit3() -> Recipe:
    """DeiT-III: the plain ViT with LayerScale 1e-4 and a learned position.

    Source: Touvron et al., 2022; facebookresearch/deit, models_v2.py, Layer_scale_init_Block.
    """
    return Recipe(
        norm="layer",
        qk_norm=False,
        qkv_bias=True,
        rope_theta=None,
        registers=0,
        register_theta=None,
    )


def dinov2() -> Recipe:
    """DINOv2 ViT-L: DeiT-III's block with LayerScale 1e-5.

    Source: Oquab et al., 2023; facebookresearch/dinov2, hub/backbones.py and
    configs/ssl_default_config.yaml. Not carried over: patch 14, and the SwiGLU of its giant size.
    """
    return replace(deit3(), layer_scale_init=1e-5)


def dinov3() -> Recipe:
    """DINOv3 ViT-L: no absolute position, coordinates from -1 to 1, unrotated registers.

    Coordinate x turns a pair by 2 pi x / period, periods from 1 upward with base 100: a whole side
    is 4 pi. The qkv bias has no part for the keys. Source: Simeoni et al., 2025;
    facebookresearch/dinov3, hub/backbones.py, dinov3_vitl16. Not carried over: the random scaling
    of coordinates in training, and the order of channels in a head, which weights absorb.
    """
    return Recipe(
        norm="layer",
        layer_scale_init=1e-5,
        qk_norm=False,
        qkv_bias=True,
        key_bias=False,
        position="none",
        rope_theta=100.0,
        rope_extent=4 * math.pi,
        registers=4,
        register_theta=None,
    )


def visionllama() -> Recipe:
    """VisionLLaMA, its plain form: SwiGLU without biases, 2D rotation, LayerNorm, LayerScale.

    Source: Chu et al., 2024; Meituan-AutoML/VisionLLaMA, deit/my_models.py,
    vit_llama_rope_large_patch16. Not carried over: the rotation of cls, hidden widths rounded up to
    multiples of 256, and rows and columns that alternate in a head, which weights absorb.
    """
    return Recipe(
        norm="layer",
        mlp="swiglu",
        mlp_bias=False,
        qk_norm=False,
        qkv_bias=True,
        position="none",
        registers=0,
        register_theta=None,
    )


def llama() -> Recipe:
    """LLaMA: RMSNorm, SwiGLU, rotation, no bias anywhere.

    Source: Touvron et al., 2023; meta-llama/llama3, llama/model.py.
    """
    return Recipe(
        mlp="swiglu",
        mlp_bias=False,
        layer_scale="none",
        qk_norm=False,
        proj_bias=False,
        position="none",
        registers=0,
        register_theta=None,
    )


def qwen3() -> Recipe:
    """Qwen3, dense: LLaMA's block with RMS norm of queries and keys per head.

    Source: Yang et al., 2025; transformers, models/qwen3/modular_qwen3.py. Not carried over: heads
    wider than width / heads.
    """
    return replace(llama(), qk_norm=True)


def gpt_oss() -> Recipe:
    """GPT-oss: attention sinks, clamped SwiGLU, biases everywhere.

    The MLP is clamp(gate, max 7) * sigmoid(1.702 gate) * (clamp(up, 7) + 1). Source: OpenAI, 2025;
    openai/gpt-oss, gpt_oss/torch/model.py.
    """
    return replace(
        llama(),
        mlp="clamped_swiglu",
        mlp_bias=True,
        qkv_bias=True,
        proj_bias=True,
        attention_sink=True,
    )


def gemma3() -> Recipe:
    """Gemma3: norms before and after each branch, GeGLU, QK-norm, no bias.

    Source: Gemma Team, 2025; transformers, models/gemma3/modular_gemma3.py. Not carried over:
    embeddings times sqrt(width), and norm weights stored as 1 + w.
    """
    return replace(qwen3(), mlp="geglu", post_norm=True)


RECIPES: dict[str, Recipe] = {
    "ViT5": VIT5,
    "SiT": PLAIN,
    "DiT": PLAIN,
    "DeiT3": deit3(),
    "DINOv2": dinov2(),
    "DINOv3": dinov3(),
    "VisionLLaMA": visionllama(),
    "LLaMA": llama(),
    "Qwen3": qwen3(),
    "GPT-oss": gpt_oss(),
    "Gemma3": gemma3(),
    **{f"ViT5-{name}": recipe for name, recipe in ABLATIONS.items()},
}
