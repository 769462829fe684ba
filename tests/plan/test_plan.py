"""The estimate against hand calculations, real tensors and real checkpoints; its command."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from autoencoders import random_autoencoder
from helpers import ROOT, command_environment
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sit_vit5.analysis.plan import LiveMemory, Plan, activations, call_peak, encoding, make_plan
from sit_vit5.analysis.plan_report import duration, report
from sit_vit5.codecs import CODECS
from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.commands.plan import main as run_plan
from sit_vit5.config import CheckpointConfig, CodecConfig, presets
from sit_vit5.config.parse import load_config, parse_over_train
from sit_vit5.config.plan import DEVICES, PlanCommand
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.training.disk import checkpoints_on_disk, run_disk
from sit_vit5.training.train_state import TrainState
from sit_vit5.utils.errors import UserError, size_text
from sit_vit5.utils.precision import autocast

IMAGENET = "configs/imagenet256_vit5_xl.yaml"
# Width 8, one block, on 8x8 digits: small enough to count by hand.
BY_HAND = [
    "--model", "SiT-Nano/2", "--backbone.width", "8", "--backbone.depth", "1",
    "--backbone.heads", "2", "--backbone.mlp-ratio", "2", "--data.image-size", "8",
    "--codec.name", "identity", "--precision", "fp32", "--batch-size", "8",
    "--accumulation", "2", "--ema.decays", "0.9", "0.99",
]  # fmt: skip


def planned(*argv: str) -> PlanCommand:
    return parse_over_train(PlanCommand, list(argv))


def by_hand(*argv: str, gpus: int = 2) -> PlanCommand:
    return planned(*BY_HAND, "--gpus", str(gpus), "--data.source", "digits", *argv)


def test_a_tiny_plan_is_what_the_hand_calculation_says():
    options = by_hand(
        "--utilisation", "0.5", "--tflops-fp32", "0.001",
        "--steps", "100", "--checkpoint.every", "10",
    )  # fmt: skip
    plan = make_plan(options)
    # Patch, positions, time, labels, modulation, qkv, projection, MLP, last modulation, output.
    parameters = 40 + 128 + 2056 + 72 + 88 + 432 + 216 + 72 + 144 + 136 + 144 + 36
    trainable = parameters - 128
    # 16 tokens: patch, qkv, projection, two products of attention, MLP, output; then per image.
    multiply_adds = 16 * (32 + 192 + 64 + 2 * 16 * 8 + 256 + 32) + 2048 + 64 + 384 + 128
    assert (plan.parameters, plan.trainable) == (parameters, trainable)
    assert plan.flops == 2 * multiply_adds
    assert plan.batch.micro_batch_size == 2
    assert plan.step_flops == 3 * 8 * 2 * multiply_adds
    assert plan.model_seconds == pytest.approx(plan.step_flops / (2 * 0.5 * 1e9))
    assert plan.encoding_seconds == 0 and plan.memory.encoder == 0
    memory = plan.memory
    assert memory.weights == 4 * parameters and memory.averages == 2 * 4 * parameters
    assert memory.gradients == memory.buckets == 4 * trainable
    assert memory.moments == 8 * trainable
    assert plan.disk.checkpoint == 3 * 4 * parameters + 8 * trainable
    assert plan.disk.checkpoints == 4 * plan.disk.checkpoint
    one = make_plan(by_hand(gpus=1))
    assert one.memory.buckets == 0 and one.batch.micro_batch_size == 4


def test_the_sum_holds_every_item_and_the_larger_of_step_and_encoding():
    memory = make_plan(by_hand()).memory
    step = memory.activations
    state = memory.weights + memory.gradients + memory.moments + memory.averages + memory.buckets
    own = step.weight_copies + step.kept + step.working
    assert own > 0 and memory.total == state + own
    assert replace(memory, encoder=7, encoding=own + 5).total == state + 7 + own + 5
    assert replace(memory, encoder=7, encoding=own - 5).total == state + 7 + own


def network(name: str, side: int = 32) -> Denoiser:
    return Denoiser(
        presets.backbone(name), in_channels=4, input_size=(side, side), num_classes=1000
    )


def kept_for_backward(model: Denoiser, images: int, precision: str) -> int:
    """Bytes that autograd really keeps for the backward pass on the CPU, weights excepted."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    latents, t = torch.randn(images, 4, 32, 32), torch.rand(images)
    labels = torch.zeros(images, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(latents.device, precision):
        loss = model(latents, t, labels).square().mean()
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["SiT-S/2", "ViT5-S/2"])
def test_activations_are_what_autograd_keeps_within_half_a_percent(name, precision):
    counted = activations(
        lambda: network(name), (4, 32, 32), micro_batch_size=2, precision=precision
    )
    real = kept_for_backward(network(name), 2, precision)
    assert counted.weight_copies + counted.kept == pytest.approx(real, rel=0.005)


def test_recomputing_keeps_little_more_than_the_blocks_inputs():
    def build(activation_checkpointing: bool) -> Denoiser:
        model = network("ViT5-S/2")
        model.activation_checkpointing = activation_checkpointing
        return model

    little, all_of_it = (
        activations(lambda r=r: build(r), (4, 32, 32), micro_batch_size=4, precision="fp32").kept
        for r in (True, False)
    )
    inputs = 12 * 4 * 260 * 384 * 4  # blocks, images, tokens, channels, bytes
    assert inputs < little < 1.5 * inputs < all_of_it / 8


def test_bf16_keeps_a_copy_of_every_weight_that_meets_a_token():
    counted = activations(
        lambda: network("SiT-S/2"), (4, 32, 32), micro_batch_size=1, precision="bf16"
    )
    # 12 blocks of attention (4 matrices) and MLP (8) of 384 x 384, and the patch embedding.
    weights = 12 * 12 * 384**2 + 16 * 384
    assert counted.weight_copies == pytest.approx(2 * weights, rel=0.001)


def test_live_memory_counts_what_lives_and_what_lived():
    x = torch.zeros(256)
    with LiveMemory([x]) as memory:
        view = x.view(16, 16)
        assert memory.now == 0
        y = view + 1
        z = y * 2
        assert memory.now == 2048
        del y
        assert memory.now == 1024 and memory.peak == 2048
        del z
    assert memory.now == 0


def test_backward_takes_twice_the_flops_of_forward():
    model = network("SiT-Micro/2", 16)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(torch.randn(1, 4, 16, 16), torch.rand(1), torch.zeros(1, dtype=torch.long))
        forward = counter.get_total_flops()
        loss.square().mean().backward()
    assert counter.get_total_flops() / forward == pytest.approx(3, rel=0.01)


def test_a_checkpoint_has_the_bytes_that_are_planned():
    config = by_hand().train
    learner = TrainState(config, (1, 8, 8), tuple("0123456789"), torch.device("cpu"))
    for parameter in learner.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    learner.update(0)
    tensors = learner.tensors()
    moments = {n: v for n, v in tensors["optimizer"].items() if not n.startswith("step.")}
    averages = [tensors[name] for name in config.ema.names]
    real = [tensors["raw"], moments, *averages]
    plan = make_plan(by_hand())
    assert len(averages) == 2
    assert plan.disk.checkpoint == sum(v.nbytes for part in real for v in part.values())


@pytest.mark.parametrize(
    ("keep", "every", "steps", "expected"),
    [(3, 10, 100, 4), (0, 10, 100, 11), (0, 10, 101, 12), (3, 0, 100, 2), (1, 10, 5, 2)],
)
def test_checkpoints_on_disk(keep, every, steps, expected):
    assert checkpoints_on_disk(CheckpointConfig(every=every, keep=keep), steps) == expected
    assert run_disk(by_hand().train, 10, 6).checkpoint == 4 * 30 + 8 * 6


def test_averages_of_widths_and_their_snapshots_are_counted():
    def count(*argv: str) -> tuple[Plan, str]:
        options = by_hand("--steps", "100", *argv)
        plan = make_plan(options)
        return plan, report(options, plan)

    plain, without = count()
    plan, shown = count("--ema.widths", "0.05", "0.1", "--ema.snapshot-every", "30")
    assert plan.memory.averages == 2 * plain.memory.averages
    assert plan.disk.checkpoint - plain.disk.checkpoint == 2 * 4 * plan.parameters
    # Steps 30, 60, 90 and 100, two fp16 files each.
    size = size_text(4 * 2 * 2 * plan.parameters)
    assert f"and {size} for all snapshots of averages" in shown
    assert "snapshots" not in without


def test_stable_diffusions_encoder_is_counted_without_its_weights():
    small = encoding(CodecConfig("sd-vae-ema"), (3, 256, 256), 1)
    assert small.latent_shape == (4, 32, 32) and small.factor == 8
    assert small.weights == 4 * 83_653_863  # Rombach et al. (2022), f8 with KL
    # The first convolutions alone: 3 -> 128 and four of 128 -> 128, 3x3, at 256x256.
    assert small.flops > 2 * 256**2 * 9 * 128 * (3 + 4 * 128)
    # At least two maps of 128 channels at full size in fp32 live together.
    assert small.working > 2 * 4 * 128 * 256**2
    double = encoding(CodecConfig("sd-vae-mse"), (3, 256, 256), 2)
    assert double.flops == small.flops and double.weights == small.weights
    assert double.working == pytest.approx(2 * small.working, rel=0.01)


@pytest.mark.parametrize(
    ("sort", "latent_shape"), [("scale", (4, 8, 16)), ("tiny", (4, 4, 8)), ("dc", (8, 4, 8))]
)
def test_the_autoencoder_of_a_folder_is_counted_like_a_real_one(tmp_path, sort, latent_shape):
    vae = random_autoencoder(sort)
    vae.save_pretrained(tmp_path)
    found = encoding(CodecConfig("diffusers", str(tmp_path)), (3, 16, 32), 2)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        vae.encode(torch.zeros(1, 3, 16, 32))
    assert found.flops == counter.get_total_flops() > 0 and found.working > 0
    assert found.latent_shape == latent_shape
    assert found.weights == 4 * sum(p.numel() for p in vae.parameters())


def test_taesd_is_counted_without_its_weights_and_an_unnamed_autoencoder_refused():
    assert encoding(CodecConfig("taesd"), (3, 256, 256), 1).latent_shape == (4, 32, 32)
    with pytest.raises(UserError, match="give it with --codec.path"):
        encoding(CodecConfig("diffusers"), (3, 256, 256), 1)


def test_the_imagenet_recipe_is_sits_and_can_be_planned():
    config = load_config(ROOT / IMAGENET)
    assert config.data.path is None and config.data.source is None
    assert (config.steps, config.batch_size, config.optimizer.lr) == (7_000_000, 256, 1e-4)
    assert (config.optimizer.warmup_steps, config.optimizer.clip_norm) == (0, 0)
    assert config.ema.decays == (0.9999,) and not config.ema.warmup
    assert config.codec.name == "sd-vae-ema" and config.backbone.recipe.layer_scale == "product"
    assert "Not reproduced here" in (ROOT / IMAGENET).read_text()
    assert config.backbone == presets.backbone("ViT5-XL/2")


def test_xl_at_batch_256_does_not_fit_eight_cards_of_24_gb():
    # github.com/facebookresearch/DiT/issues/22: a user's out-of-memory error.
    options = planned("--model", "SiT-XL/2", "--precision", "fp32", "--device", "rtx4090")
    plan = make_plan(options)
    assert plan.batch.micro_batch_size == 32 and not plan.fits(plan.memory)
    assert "fits: no" in report(options, plan) and "--accumulation" in report(options, plan)
    assert 24e9 < plan.memory.total < DEVICES["h100"].memory_gb * 1e9


def test_recompute_costs_a_forward_pass_and_saves_memory():
    small = ("--model", "ViT5-Nano/2", "--data.image-size", "32", "--codec.name", "identity")
    kept, again = (
        make_plan(planned(*small, "--activation-checkpointing", r)) for r in ("False", "True")
    )
    assert (kept.passes, again.passes) == (3, 4)
    assert again.step_flops * 3 == kept.step_flops * 4
    assert again.model_seconds == pytest.approx(kept.model_seconds * 4 / 3)
    assert kept.memory_if_switched == again.memory and again.memory_if_switched == kept.memory
    assert again.memory.total < kept.memory.total
    tight = f"{(kept.memory.total + again.memory.total) / 2e9 / 0.9}"
    options = planned(*small, "--memory-gb", tight)
    assert "fits: no" in report(options, make_plan(options))
    assert "; --activation-checkpointing True, or raise" in report(options, make_plan(options))
    options = planned(*small, "--memory-gb", tight, "--activation-checkpointing", "True")
    shown = report(options, make_plan(options))
    assert "fits: yes" in shown and "once again in the backward pass" in shown


def test_attention_written_out_keeps_its_weights():
    small = ("--model", "ViT5-Nano/2", "--data.image-size", "32", "--codec.name", "identity")
    fused, written = (
        make_plan(planned(*small, "--attention", name)).memory.activations.kept
        for name in ("fused", "fp32_math")
    )
    # 4 blocks, 32 images, 4 heads, 260 x 260 softmax weights in fp32.
    assert written - fused > 4 * 32 * 4 * 260**2 * 4


def test_time_is_of_model_and_encoder_each_at_its_own_peak():
    options = planned("--model", "SiT-S/2", "--gpus", "4", "--utilisation", "0.25")
    plan = make_plan(options)
    assert DEVICES["h200"].bf16 == 989.5 and DEVICES["h200"].fp32 == 67
    assert plan.model_seconds == pytest.approx(3 * plan.flops * 256 / (4 * 0.25 * 989.5e12))
    encoder = encoding(CodecConfig(), (3, 256, 256), 1).flops
    assert plan.encoding_seconds == pytest.approx(encoder * 256 / (4 * 0.25 * 67e12))
    assert "encoding, beyond" not in report(options, plan)  # 16 images at once: less than a step
    small = planned("--model", "SiT-S/2", "--gpus", "1", "--batch-size", "16")
    plan_of_small = make_plan(small)
    assert plan_of_small.memory.encoding == plan.memory.encoding
    assert "encoding, beyond what a step takes" in report(small, plan_of_small)


def test_sampling_is_250_calls_for_each_of_50000_images_and_twice_with_guidance():
    options = planned("--model", "SiT-S/2", "--gpus", "4", "--utilisation", "0.25")
    plan = make_plan(options)
    flops = 50_000 * 250 * plan.flops
    tf32 = flops / (4 * 0.25 * 494.5e12)
    assert plan.sampling_seconds("tf32", passes=1) == pytest.approx(tf32)
    fp32 = plan.sampling_seconds("fp32", passes=2)
    assert fp32 == pytest.approx(2 * flops / (4 * 0.25 * 67e12))
    shown = report(options, plan)
    assert f"{duration(tf32)}, guided {duration(2 * tf32)} in tf32" in shown
    assert f"guided {duration(fp32)} in fp32" in shown
    without = planned("--model", "SiT-S/2", "--data.unconditional", "True")
    assert "guided" not in report(without, make_plan(without))


def test_unnamed_data_are_planned_as_cached_latents_and_named_images_as_encoded(monkeypatch):
    class Images(list):
        kind, item_shape, class_names = "images", (3, 256, 256), ("a", "b")

    monkeypatch.setattr("sit_vit5.analysis.plan.build_source", lambda data: Images([1, 2]))
    for argv, first in (((), "on latents encoded once"), (("--data.path", "x"), "encoding every")):
        options = planned("--model", "SiT-S/2", "--steps", "1000", *argv)
        plan = make_plan(options)
        (line,) = [line for line in report(options, plan).splitlines() if line.startswith("time:")]
        assert first in line
        seconds = plan.model_seconds + (plan.encoding_seconds if argv else 0)
        assert line.startswith(f"time: {duration(1000 * seconds)} for 1,000 steps")


def test_encoding_once_is_both_mirrors_of_every_image(tmp_path):
    options = planned("--model", "SiT-S/2", "--gpus", "4", "--utilisation", "0.25")
    plan = make_plan(options)
    encoder = encoding(CodecConfig(), (3, 256, 256), 1)
    assert encoder.moments == 2 * 4 * 32 * 32  # means and log-variances
    assert plan.cache.bytes == 1_281_167 * 2 * 8 * 32 * 32 * 4
    seconds = 1_281_167 * 2 * encoder.flops / (4 * 0.25 * options.peaks().fp32 * 1e12)
    assert plan.cache.seconds == pytest.approx(seconds)
    assert "84 GB of disk for 1,281,167 images and their mirrors" in report(options, plan)
    plain = make_plan(planned("--model", "SiT-S/2", "--data.horizontal-flip", "False"))
    assert plain.cache.bytes == plan.cache.bytes // 2


def test_classes_are_counted_in_the_data_or_given():
    assert make_plan(by_hand("--classes", "5")).data.num_classes == 10
    without = [*BY_HAND, "--gpus", "2"]
    assert make_plan(planned(*without, "--classes", "5")).data.num_classes == 5
    unconditional = make_plan(planned(*without, "--data.unconditional", "True"))
    assert unconditional.data.num_classes == 0 and unconditional.data.item_shape == (3, 8, 8)


def test_latents_need_no_codec(monkeypatch):
    class Cached(list):
        kind, item_shape, class_names = "moments", (4, 6, 8), ("a", "b")

    monkeypatch.setattr("sit_vit5.analysis.plan.build_source", lambda data: Cached([1, 2]))
    options = planned("--model", "SiT-Nano/2", "--data.path", "cache")
    plan = make_plan(options)
    assert plan.encoding.latent_shape == (4, 6, 8) and plan.data.num_classes == 2
    assert plan.memory.encoder == plan.encoding_seconds == 0 and plan.cache is None
    assert "latents 4 x 6 x 8, 2 classes" in report(options, plan)


def test_a_codec_that_is_not_counted_is_named(monkeypatch):
    monkeypatch.setitem(CODECS, "other", lambda path, **_: IdentityCodec())
    options = by_hand()
    options = replace(options, train=replace(options.train, codec=CodecConfig("other")))
    assert "the codec other is not counted" in report(options, make_plan(options))
    assert "not counted" not in report(by_hand(), make_plan(by_hand()))


def test_the_report_says_what_the_options_change():
    def shown(*argv: str) -> str:
        options = by_hand("--tflops-fp32", "1e-6", *argv)
        return report(options, make_plan(options))

    assert "for all of them" in shown("--checkpoint.keep", "0")
    assert "not compiled" in shown() and "not compiled" not in shown("--compile", "False")
    # 3 x 31,872 x 8 FLOPs at 2 x 0.4 x 1e6 per second: 0.956 s a step.
    assert "time: 9.56 seconds for 10 steps" in shown("--steps", "10")
    assert "time: 2.7 hours for 10,000 steps" in shown("--steps", "10000")
    assert "time: 11.1 days for 1,000,000 steps" in shown("--steps", "1000000")


def command(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    shown = subprocess.run(
        [sys.executable, "-m", "sit_vit5", "plan", *arguments],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert shown.returncode == code, shown.stderr
    return shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "100"], "not divisible by 8 processes x 1 accumulation steps; use 96"),
        (["--gpus", "0"], "gpus 0 must be at least 1"),
        (["--classes", "0"], "classes 0 must be at least 1"),
        (["--device", "h20"], "unknown device 'h20'; nearest: h200, h100"),
        (["--utilisation", "40"], "utilisation 40.0 must be at most 1"),
        (["--memory-gb", "0"], "memory_gb 0.0 must be above 0"),
        (["--tflops-bf16", "nan"], "tflops_bf16 nan must be finite"),
        (["--model", "ViT5-XXL"], "nearest: ViT5-XL"),
        (["--data.image-size", "264"], "use 256 or 272"),
        (["--data.path", "absent"], "absent does not exist"),
        (["--config", "absent.yaml"], "absent.yaml does not exist"),
        (["--gpu", "8"], "nearest: gpus"),
    ],
)
def test_a_wrong_plan_is_refused(argv, message):
    with pytest.raises(UserError, match=message):
        make_plan(planned(*argv))


def test_the_command_answers_on_both_configurations(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    shown = command("--config", IMAGENET, "--gpus", "8", "--device", "h200").stdout
    for words in (
        "ViT5-XL/2, latents 4 x 32 x 32, 1000 classes, bf16, on 8 x h200",
        "parameters: 675,087,568",
        "32 per forward pass x 8 processes x 1 accumulation steps = 256 images",
        "fits: yes",
        "time: 4.7 days for 7,000,000 steps (17.1 steps per second) on latents encoded once",
        "or: 31.1 days for 7,000,000 steps",
        "guided 1.1 hours in tf32",
        "guided 7.8 hours in fp32",
    ):
        assert words in shown
    page = (ROOT / "docs/reproduce.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| H200, H100 |"))
    once, days, _, memory, sampling, *_ = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert f"sit_vit5 encode: {once} and" in shown and f"time: {days} for" in shown
    assert f"guided {sampling} in tf32" in shown
    total = float(re.search(r"^  sum +([\d.]+)$", shown, re.MULTILINE)[1])
    assert float(memory.removesuffix(" GB")) == pytest.approx(total, rel=0.05)
    run_plan(["--config", "configs/digits.yaml", "--gpus", "1"])
    shown = capsys.readouterr().out
    assert "10 classes, fp32, on 1 x h200" in shown and "memory per GPU in MB" in shown
    assert "encoding" not in shown


def test_a_wrong_command_gets_one_line_and_status_two():
    (line,) = command("--device", "v100", code=2).stderr.splitlines()
    assert line.startswith("error: ") and "h100" in line


@pytest.mark.parametrize("module", ["plan", "models"])
def test_help_lists_the_options_without_torch(module):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['sit_vit5', {module!r}, '--help']\n"
        "try:\n"
        "    runpy.run_module('sit_vit5', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    expected = {
        "plan": ["--gpus INT", "--optimizer.lr FLOAT", "--config"],
        "models": ["--image-size INT", "--json"],
    }[module]
    assert all(option in shown.stdout for option in expected)


def test_modules_count_the_call_and_not_their_own_weights():
    layer = nn.Linear(64, 32, bias=False)
    x = torch.zeros(8, 64)
    assert call_peak(layer, lambda: layer(x)) == 4 * 8 * 32
