"""What every sampling command starts from: a checkpoint's network, codec and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sit_vit5.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.codecs import Codec, build_codec
from sit_vit5.config import ADAPTIVE_METHODS, SDE_METHODS, GuidanceConfig, SamplerConfig
from sit_vit5.errors import UserError
from sit_vit5.flow.predictions import Flow
from sit_vit5.precision import set_tf32
from sit_vit5.sampling.generator import Generator, Settings
from sit_vit5.sampling.guidance import Guidance, guidance_scale_or_default, interval_in_time

STEPS, SDE_STEPS, ATOL, RTOL = 50, 250, 1e-6, 1e-3


@dataclass(frozen=True)
class Loaded:
    """Ready to sample."""

    checkpoint: Checkpoint
    generator: Generator

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names by label; empty for an unconditional model."""
        return self.checkpoint.state.class_names


def load(options: SamplerConfig, device: torch.device, *, default_scale: float = 1.0) -> Loaded:
    """Opens the checkpoint, checks that the codec is the one of training, builds the network.

    default_scale: of guidance, for a model that has a null label, where the options give none.
    """
    set_tf32(False)
    checkpoint = open_checkpoint(options.checkpoint)
    objective = checkpoint.config.objective
    flow = Flow(objective.interpolant, objective.prediction)
    settings = resolve(options, checkpoint, flow, default_scale=default_scale)
    codec = _open_codec(checkpoint, options.codec_path)
    model = checkpoint.denoiser(options.weights).to(device).eval().requires_grad_(False)
    reference = None
    if options.guidance.reference is not None and settings.guidance.scale != 1:
        other = open_checkpoint(options.guidance.reference)
        check_reference(checkpoint, other)
        reference = other.denoiser(options.guidance.reference_weights)
        reference = reference.to(device).eval().requires_grad_(False)
    return Loaded(checkpoint, Generator(model, codec, flow, settings, reference))


def resolve(
    options: SamplerConfig, checkpoint: Checkpoint, flow: Flow, *, default_scale: float
) -> Settings:
    """The settings with every default decided."""
    objective, method = checkpoint.config.objective, options.method
    fixed, noisy = method not in ADAPTIVE_METHODS, method in SDE_METHODS
    trained_shift = objective.shift if fixed else 1.0
    plain = Settings(
        method=method,
        steps=(options.steps or (SDE_STEPS if noisy else STEPS)) if fixed else None,
        atol=None if fixed else options.atol or ATOL,
        rtol=None if fixed else options.rtol or RTOL,
        shift=trained_shift if options.shift is None else options.shift,
        eps=options.eps,
        sde=options.sde if noisy else None,
        precision=options.precision,
        attention=options.attention,
        seed=options.seed,
    )
    times = plain.times(flow) if fixed else None
    guidance = _guidance(options.guidance, checkpoint, flow, times, default_scale)
    return replace(plain, guidance=guidance)


def check_reference(checkpoint: Checkpoint, other: Checkpoint) -> None:
    """Refuses a worse network of other classes, latents or prediction."""
    for what, ours, its in (
        ("classes", checkpoint.state.class_names, other.state.class_names),
        ("latents", checkpoint.state.codec, other.state.codec),
        ("latent size", checkpoint.state.input_size, other.state.input_size),
        ("path", checkpoint.config.objective.interpolant, other.config.objective.interpolant),
        ("prediction", checkpoint.config.objective.prediction, other.config.objective.prediction),
    ):
        if ours != its:
            raise UserError(
                f"guidance.reference {other.folder} has other {what} than {checkpoint.folder}; "
                "autoguidance needs a worse network of the same kind"
            )


def _guidance(
    options: GuidanceConfig,
    checkpoint: Checkpoint,
    flow: Flow,
    times: list[float] | None,
    default_scale: float,
) -> Guidance:
    scale = options.scale
    if options.reference is None:
        scale = guidance_scale_or_default(
            scale,
            class_names=checkpoint.state.class_names,
            class_dropout=checkpoint.config.objective.class_dropout,
            default=default_scale,
        )
    elif scale is None:
        raise UserError("guidance.reference needs guidance.scale, such as 2")
    channels = checkpoint.state.in_channels
    if options.channels is not None and options.channels > channels:
        raise UserError(f"guidance.channels {options.channels} must be at most {channels}")
    interval = interval_in_time(
        options.interval, options.interval_unit, interpolant=flow.interpolant, times=times
    )
    if scale == 1:
        return Guidance()
    return Guidance(scale, options.channels, interval, options.schedule)


def _open_codec(checkpoint: Checkpoint, path: str | None) -> Codec:
    trained = checkpoint.config.codec
    codec = build_codec(trained.name, path or trained.path)
    if codec.identity != checkpoint.state.codec:
        raise UserError(
            f"the codec {codec.identity} is not the one of training, {checkpoint.state.codec}; "
            "give that one with --codec-path"
        )
    return codec
