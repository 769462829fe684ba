"""From an encoder's moments to the latents that a model sees: the one place of scale and shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sit_vit5.errors import UserError, brief

# Standard deviation of latents of the right scale: SiT's settings are made for about 1. Pixels on
# [-1, 1] stay below.
USUAL_STD, USUAL_STD_OF_PIXELS = (0.5, 2.0), (0.1, 1.0)

LARGEST = 1e15  # scale or shift; the smallest scale is its inverse


@dataclass(frozen=True)
class Normalisation:
    """latents = scale * (raw - shift), by one number for all channels or one per channel."""

    scale: tuple[float, ...] = (1.0,)
    shift: tuple[float, ...] = (0.0,)

    @classmethod
    def of(cls, identity: dict) -> Normalisation:
        """What a codec's identity records: a number or a list under scale and shift."""
        return cls(_numbers(identity.get("scale", 1.0)), _numbers(identity.get("shift", 0.0)))

    @classmethod
    def of_autoencoder(cls, config: dict) -> Normalisation:
        """What diffusers' pipelines do by an autoencoder's configuration.

        scale * (raw - shift) by scaling_factor and shift_factor (Stable Diffusion 3, FLUX); where
        there are statistics per channel, scaling_factor * (raw - mean) / std (Stable Diffusion XL).
        """
        scale, shift = config["scaling_factor"], config.get("shift_factor")
        shift = 0.0 if shift is None else shift
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            mean, std = [shift], [1.0]
        _check(scale, mean, std, config["latent_channels"])
        return cls(tuple(scale / number for number in std), tuple(map(float, mean)))

    @property
    def usable(self) -> bool:
        """Whether all are finite numbers, and no scale is 0."""
        return bool(self.scale and self.shift) and _usable(self.scale, self.shift)

    def fits(self, channels: int) -> bool:
        """Whether scale and shift are one number, or one for each of these channels."""
        return {len(self.scale), len(self.shift)} <= {1, channels}

    def record(self) -> dict:
        """For a codec's identity; a single number is written as one, a shift of 0 not at all."""
        found = {"scale": _shortest(self.scale), "shift": _shortest(self.shift)}
        return found if any(self.shift) else {"scale": found["scale"]}

    def apply(self, raw: Tensor) -> Tensor:
        """Raw to normalised latents, (B, c, h, w)."""
        if any(self.shift):
            raw = raw - _column(self.shift, raw)
        return raw * _column(self.scale, raw)

    def undo(self, latents: Tensor) -> Tensor:
        """Normalised to raw latents, (B, c, h, w)."""
        return latents / _column(self.scale, latents) + _column(self.shift, latents)


def usual_std(codec: str) -> tuple[float, float]:
    """Range of the latents' standard deviation; codec: its name."""
    return USUAL_STD_OF_PIXELS if codec == "identity" else USUAL_STD


def scale_warnings(codec: str, mean: float, std: float) -> list[str]:
    """A warning if latents are far from the scale that SiT's settings are made for.

    codec: its name. mean, std: of the latents.
    """
    low, high = usual_std(codec)
    if low <= std <= high:
        return []
    if codec == "identity":
        return [
            f"warning: the pixels on [-1, 1] have mean {mean:+.3f} and standard deviation "
            f"{std:.3f}, expected {low} to {high}: the images are dark or flat; look at the data"
        ]
    return [
        f"warning: the first latents have standard deviation {std:.3f}, expected {low} to {high}; "
        "check the codec's scale (--codec.scale) and look at the data"
    ]


def draw_latents(moments: Tensor, noise: Tensor | None, normalisation: Normalisation) -> Tensor:
    """Normalised latents of a posterior. noise: standard normal (B, c, h, w).

    moments: mean and log-variance (B, 2c, h, w); or, where noise is None, the latents themselves
    before the normalisation (B, c, h, w).
    """
    if noise is None:
        return normalisation.apply(moments)
    mean, log_variance = moments.chunk(2, dim=1)
    return normalisation.apply(torch.addcmul(mean, (0.5 * log_variance).exp_(), noise))


def _check(scale: object, mean: object, std: object, channels: int) -> None:
    """Refuses what divides by zero, is no finite number or fits no channels."""
    try:
        usable = len(mean) == len(std) and len(std) in (1, channels)
        usable = usable and _usable([scale, *std], mean)
    except TypeError:  # no number, no list: a configuration holds anything
        usable = False
    if not usable:
        raise UserError(
            f"the autoencoder's config.json scales by {brief(scale, 80)} and, for {channels} "
            f"channels, shifts by {brief(mean, 80)} and divides by {brief(std, 80)}; expected "
            "finite numbers, not 0; download it again"
        )


def _usable(factors: Sequence[object], shifts: Sequence[object]) -> bool:
    """Whether all are numbers that fp32 holds, and no factor is 0."""
    numbers = [*factors, *shifts]
    # Compared, not converted: an integer of JSON may be of any length.
    real = all(type(x) in (int, float) and abs(x) <= LARGEST for x in numbers)
    return real and all(abs(x) >= 1 / LARGEST for x in factors)


def _numbers(value: float | list[float]) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _shortest(numbers: tuple[float, ...]) -> float | list[float]:
    return numbers[0] if len(numbers) == 1 else list(numbers)


def _column(numbers: tuple[float, ...], like: Tensor) -> Tensor | float:
    if len(numbers) == 1:
        return numbers[0]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)
