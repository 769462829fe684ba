"""Loading for all sampling commands: a checkpoint's network, codec and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sit_vit5.codecs import Codec, configured_codec
from sit_vit5.config import (
    ADAPTIVE_METHODS,
    SDE_METHODS,
    GuidanceConfig,
    ObjectiveConfig,
    SamplerConfig,
)
from sit_vit5.config.parse import to_dict
from sit_vit5.config.presets import activation_bytes
from sit_vit5.flow.predictions import Flow
from sit_vit5.models.checkpoint import Checkpoint, open_checkpoint
from sit_vit5.sampling.field import (
    Guidance,
    guidance_scale_or_default,
    interval_in_steps,
    interval_in_time,
)
from sit_vit5.sampling.generator import Generator, Settings
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.memory import check_memory
from sit_vit5.utils.precision import set_precision

STEPS, SDE_STEPS, ATOL, RTOL = 50, 250, 1e-6, 1e-3


@dataclass(frozen=True)
class LoadedModel:
    """Ready to sample."""

    checkpoint: Checkpoint
    generator: Generator

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names by label; empty for an unconditional model."""
        return self.checkpoint.state.class_names

    def under(self, options: SamplerConfig) -> LoadedModel:
        """The same networks under other options of sampling."""
        settings = _resolve_for(self.checkpoint, options)
        return replace(self, generator=replace(self.generator, settings=settings))


def load(
    options: SamplerConfig, device: torch.device, *, default_scale: float = 1.0
) -> LoadedModel:
    """Opens the checkpoint, checks that the codec is the one of training, builds the network.

    default_scale: of guidance, for a model that has a null label, where the options give none.
    """
    set_precision(options.precision, device)
    checkpoint = open_checkpoint(options.checkpoint)
    objective = checkpoint.config.objective
    settings = _resolve_for(checkpoint, options, default_scale=default_scale)
    codec = open_codec(checkpoint, options.codec_path)
    check_memory(
        options.batch_size
        * activation_bytes(checkpoint.config.backbone, checkpoint.state.input_size),
        f"a forward pass of batch_size {options.batch_size}",
        use="lower it",
        device=device,
    )
    model = checkpoint.denoiser(options.weights).to(device).eval().requires_grad_(False)
    reference = None
    if options.guidance.reference is not None and settings.guidance.scale != 1:
        other = open_checkpoint(options.guidance.reference)
        check_reference(checkpoint.folder, kind(checkpoint), other.folder, kind(other))
        reference = other.denoiser(options.guidance.reference_weights)
        reference = reference.to(device).eval().requires_grad_(False)
    flow = Flow(objective.interpolant, objective.prediction)
    return LoadedModel(checkpoint, Generator(model, codec, flow, settings, reference))


def _resolve_for(
    checkpoint: Checkpoint, options: SamplerConfig, *, default_scale: float = 1.0
) -> Settings:
    """`resolve` for a checkpoint's model."""
    return resolve(
        options,
        checkpoint.config.objective,
        class_names=checkpoint.state.class_names,
        channels=checkpoint.state.in_channels,
        default_scale=default_scale,
    )


def resolve(
    options: SamplerConfig,
    objective: ObjectiveConfig,
    *,
    class_names: tuple[str, ...],
    channels: int,
    default_scale: float = 1.0,
) -> Settings:
    """The settings with every default decided, for a model of this objective, with these classes
    and this number of latent channels. Which weights the options name is not read."""
    method, flow = options.method, Flow(objective.interpolant, objective.prediction)
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
    plain.times(flow) if fixed else plain.interval(flow)  # refuses steps and ends that cannot be
    scale = _guidance_scale(options.guidance, objective, class_names, default_scale)
    guidance = _guidance(options.guidance, scale, channels, flow.interpolant, plain.steps)
    return replace(plain, guidance=guidance)


def kind(checkpoint: Checkpoint) -> dict[str, object]:
    """Properties that a network and the worse network that guides it must share, by name."""
    state, objective = checkpoint.state, checkpoint.config.objective
    return {
        "classes": state.class_names,
        "latents": state.codec,
        "latent size": state.input_size,
        "path": objective.interpolant,
        "prediction": objective.prediction,
    }


def check_reference(
    name: object, ours: dict[str, object], other: object, its: dict[str, object]
) -> None:
    """Refuses a worse network of another `kind`: other classes, latents or prediction."""
    for what in ours:
        if ours[what] != its[what]:
            raise UserError(
                f"guidance.reference {other} has other {what} than {name}; "
                "autoguidance needs a worse network of the same kind"
            )


def _guidance_scale(
    options: GuidanceConfig,
    objective: ObjectiveConfig,
    class_names: tuple[str, ...],
    default: float,
) -> float:
    if options.reference is None:
        return guidance_scale_or_default(
            options.scale,
            class_names=class_names,
            class_dropout=objective.class_dropout,
            default=default,
        )
    if options.scale is None:
        raise UserError("guidance.reference needs guidance.scale, such as 2")
    return options.scale


def _guidance(
    options: GuidanceConfig, scale: float, channels: int, interpolant: str, steps: int | None
) -> Guidance:
    if scale == 1:
        for name, value in to_dict(options).items():
            if name != "scale" and value != to_dict(GuidanceConfig())[name]:
                raise UserError(f"guidance.{name} has no effect: give guidance.scale, such as 2")
        return Guidance()
    if options.channels is not None and options.channels > channels:
        raise UserError(f"guidance.channels {options.channels} must be at most {channels}")
    guidance = Guidance(scale, options.channels, schedule=options.schedule)
    if options.interval_unit == "step":
        return replace(guidance, steps=interval_in_steps(options.interval, steps))
    interval = interval_in_time(options.interval, options.interval_unit, interpolant=interpolant)
    return replace(guidance, interval=interval)


def open_codec(checkpoint: Checkpoint, path: str | None) -> Codec:
    """The codec of training, from where training found it or from `path`."""
    trained = checkpoint.config.codec
    codec = configured_codec(trained, path=path)
    if codec.identity != checkpoint.state.codec:
        raise UserError(
            f"the codec {codec.identity} is not the one of training, {checkpoint.state.codec}; "
            "give that one with --codec-path"
        )
    return codec
