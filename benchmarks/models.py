"""Speed of the models against their peers, in one run: `python benchmarks/models.py`.

Every pair alternates, call by call, on the same inputs; printed are medians and their ratio (above
1: ours is faster; for ViT-5 over SiT and bf16 over fp32 see the line). Training is forward and
backward of a mean square; a training step also clips, steps AdamW and averages.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial

import torch
from timing import matmul_peak, medians
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sit_vit5.config import EmaConfig, OptimizerConfig, presets
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.fused import fused_kernels
from sit_vit5.training.ema import Ema
from sit_vit5.training.optimizer import build_optimizers
from sit_vit5.utils.precision import autocast

Run = Callable[[], object]


def main() -> None:
    """Parses, measures the peak of matrix products, then each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=4, help="images at size B; XL takes a quarter")
    parser.add_argument("--step-batch", type=int, default=16, help="images of a training step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile blocks on both sides")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    options.peak = {p: matmul_peak(options.device, p) for p in options.precisions}
    for precision, peak in options.peak.items():
        print(f"matmul peak {precision}: {peak / 1e12:.2f} TFLOPS (4096 x 4096 x 4096)")
    for part in options.only:
        PARTS[part](options)


def against_diffusers(options: argparse.Namespace) -> None:
    """Recipe DiT against diffusers' DiT, B/2 and XL/2, 32x32x4 latents."""
    for name, batch in (("DiT-B/2", options.batch), ("DiT-XL/2", max(1, options.batch // 4))):
        ours, peer = denoiser(name, options).eval(), diffusers_dit(name, options)
        x, t, labels = inputs(batch, options.device)
        steps = (t * 999).long()
        pair(
            f"{name} batch {batch}, ours and diffusers",
            partial(ours, x, t, labels),
            partial(peer, x, steps, class_labels=labels, return_dict=False),
            ours,
            options,
        )


def diffusers_dit(name: str, options: argparse.Namespace) -> nn.Module:
    """diffusers' DiT of the same size."""
    from diffusers import DiTTransformer2DModel

    backbone = presets.backbone(name)
    peer = DiTTransformer2DModel(
        num_attention_heads=backbone.heads,
        attention_head_dim=backbone.width // backbone.heads,
        in_channels=4,
        out_channels=4,
        num_layers=backbone.depth,
        sample_size=32,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
    )
    if options.compile:
        for block in peer.transformer_blocks:
            block.compile(dynamic=False)
    return peer.to(options.device).eval()


def against_timm(options: argparse.Namespace) -> None:
    """ViT5Classifier-B/16 against timm's nearest model at 256 pixels, as it is and with the parts
    of ViT-5 that it lacks: QK-norm and four registers."""
    import timm

    ours = ViT5Classifier(presets.backbone("ViT5-B/16"), image_size=(256, 256))
    ours = ours.to(options.device).eval()
    images = torch.randn(options.batch, 3, 256, 256, device=options.device)
    like_vit5 = {"qk_norm": True, "num_reg_tokens": 4}
    for what, parts in (("", {}), (", QK-norm, 4 registers", like_vit5)):
        peer = timm.create_model("vit_base_patch16_rope_reg1_gap_256", **parts)
        peer = peer.to(options.device).eval()
        if options.compile:
            for block in [*([] if parts else ours.blocks), *peer.blocks]:
                block.compile(dynamic=False)
        title = f"ViT-5-B/16 batch {options.batch}, ours and timm rope_reg1_gap{what}"
        pair(title, partial(ours, images), partial(peer, images), ours, options)


def against_sit(options: argparse.Namespace) -> None:
    """What ViT-5's components cost: SiT-B/2 and ViT5-B/2; ratio below 1, aim 1/1.06 and 1/1.10."""
    ours, plain = denoiser("ViT5-B/2", options), denoiser("SiT-B/2", options)
    x, t, labels = inputs(options.batch, options.device)
    title = f"ViT5-B/2 and SiT-B/2 batch {options.batch}"
    pair(title, partial(ours, x, t, labels), partial(plain, x, t, labels), ours, options)


def training_step(options: argparse.Namespace) -> None:
    """A whole step of ViT5-B/2 and SiT-B/2 in each precision."""
    x, t, labels = inputs(options.step_batch, options.device)
    for name in ("SiT-B/2", "ViT5-B/2"):
        steps = {p: step_of(denoiser(name, options), x, t, labels, p) for p in options.precisions}
        times = medians(list(steps.values()), repeats=options.repeats, device=options.device)
        flops = 3 * count(denoiser(name, options), lambda model: model(x, t, labels))
        for precision, seconds in zip(steps, times, strict=True):
            share = flops / seconds / options.peak[precision]
            ratio = times[0] / seconds
            print(
                f"{name} training step, batch {options.step_batch}, {precision}: {seconds:.3f} s, "
                f"{share:.0%} of the matmul peak, {ratio:.2f}x {options.precisions[0]}"
            )


PARTS = {
    "diffusers": against_diffusers,
    "timm": against_timm,
    "sit": against_sit,
    "step": training_step,
}


def denoiser(name: str, options: argparse.Namespace) -> Denoiser:
    """A network whose gates and output are not zero, so that no path is empty."""
    torch.manual_seed(0)
    model = Denoiser(
        presets.backbone(name), in_channels=4, input_size=(32, 32), num_classes=1000
    ).to(options.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
    if options.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def inputs(batch: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, times and labels."""
    x, t = torch.randn(batch, 4, 32, 32, device=device), torch.rand(batch, device=device)
    return x, t, torch.randint(0, 1000, (batch,), device=device)


def step_of(model: Denoiser, x: Tensor, t: Tensor, labels: Tensor, precision: str) -> Run:
    """One training step as the trainer takes it."""
    (optimizer,) = build_optimizers(model, OptimizerConfig())
    ema = Ema(model, EmaConfig())

    def step() -> None:
        with fused_kernels(), autocast(x.device, precision):
            loss = model(x, t, labels).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update(model, 0)

    return step


def pair(title: str, ours: Run, peer: Run, model: nn.Module, options: argparse.Namespace) -> None:
    """Prints forward and training of both in every precision, with their ratio."""
    flops = count(model, lambda _: ours())
    for precision in options.precisions:
        for kind, run, cost in (("forward", forward, 1), ("training", train, 3)):
            runs = [partial(run, call, precision, options) for call in (ours, peer)]
            mine, its = medians(runs, repeats=options.repeats, device=options.device)
            share = cost * flops / mine / options.peak[precision]
            print(
                f"{title}, {precision} {kind}: {mine:.3f} s and {its:.3f} s, "
                f"ratio {its / mine:.2f}, ours at {share:.0%} of the matmul peak",
                flush=True,
            )


def forward(call: Run, precision: str, options: argparse.Namespace) -> None:
    """One forward pass as in sampling."""
    with torch.no_grad(), autocast(torch.device(options.device), precision):
        call()


def train(call: Run, precision: str, options: argparse.Namespace) -> None:
    """One forward and backward pass."""
    with fused_kernels(), autocast(torch.device(options.device), precision):
        output = call()
        loss = (output[0] if isinstance(output, tuple) else output).square().mean()
    loss.backward()


def count(model: nn.Module, call: Callable[[nn.Module], object]) -> int:
    """FLOPs of a forward pass, 2 per multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(model)
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
