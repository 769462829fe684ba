"""Autoencoders of images: loading, encoding, decoding, scale and shift of their latents."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sit_vit5.utils.errors import UserError, brief, choose
from sit_vit5.utils.tensors import check_values, read_diffusers

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny


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
        """Value in a codec's identity: a number or a list under scale and shift."""
        return cls(_numbers(identity.get("scale", 1.0)), _numbers(identity.get("shift", 0.0)))

    @classmethod
    def of_autoencoder(cls, config: dict) -> Normalisation:
        """Normalisation of latents as diffusers' pipelines do it by an autoencoder's configuration.

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
        """True if all are finite numbers and no scale is 0."""
        return bool(self.scale and self.shift) and _usable(self.scale, self.shift)

    def fits(self, channels: int) -> bool:
        """True if scale and shift are one number, or one for each of these channels."""
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
    """True if all are numbers that fp32 holds and no factor is 0."""
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


@dataclass(frozen=True)
class Kind:
    """A class of diffusers whose images (B, C, H, W) and latents (B, c, h, w) have four axes.

    name: in a codec's identity. draws_noise: it gives a posterior, not the latents themselves.
    levels: its option with one entry per level of the encoder. moments: of what `encode` returns.
    """

    name: str
    draws_noise: bool
    levels: str
    moments: Callable[[Any], Tensor]

    def factor(self, config: dict) -> int:
        """Pixels per latent along a side: every level but one halves it."""
        return 2 ** (len(config[self.levels]) - 1)


def _of_posterior(encoded: Any) -> Tensor:
    """Mean and log-variance, (B, 2c, h, w)."""
    return torch.cat([encoded.latent_dist.mean, encoded.latent_dist.logvar], dim=1)


# Not here: FLUX.2's (its statistics belong to patches of 2x2 latents), Qwen-Image's (video, five
# axes), VQModel (decodes the nearest code, not the latents), RAE (normalises inside).
KINDS: dict[str, Kind] = {
    "AutoencoderKL": Kind("autoencoder_kl", True, "block_out_channels", _of_posterior),
    "AutoencoderTiny": Kind(
        "autoencoder_tiny", False, "encoder_block_out_channels", lambda encoded: encoded.latents
    ),
    "AutoencoderDC": Kind(
        "autoencoder_dc", False, "encoder_block_out_channels", lambda encoded: encoded.latent
    ),
}

# Codec names to the hub id and the class of what they mean; None: whatever --codec.path names.
AUTOENCODERS: dict[str, tuple[str | None, str | None]] = {
    "sd-vae-ema": ("stabilityai/sd-vae-ft-ema", "AutoencoderKL"),
    "sd-vae-mse": ("stabilityai/sd-vae-ft-mse", "AutoencoderKL"),
    "taesd": ("madebyollin/taesd", "AutoencoderTiny"),
    "diffusers": (None, None),
}


@dataclass(frozen=True)
class Found:
    """An autoencoder before its weights are read.

    source: as the user gave it. repository, subfolder: where diffusers looks. revision: the commit
    hash of files from the hub.
    """

    source: str
    repository: str
    subfolder: str | None
    revision: str | None
    config: dict

    @property
    def origin(self) -> dict:
        """For people: a hub id, or a folder's name without the way there, and the revision."""
        folder = Path(self.source)
        found = {"id": folder.resolve().name if folder.is_dir() else self.source}
        return found if self.revision is None else found | {"revision": self.revision}

    def load(self, *, local_only: bool) -> nn.Module:
        """The network with its weights."""
        remedy = "download the autoencoder again"
        folder = Path(self.repository, self.subfolder or "")
        if folder.is_dir():  # diffusers casts any type
            read_diffusers(folder, remedy=remedy)
        with _errors_in_one_line(self.source):
            network, report = _diffusers_class(self.config["_class_name"]).from_pretrained(
                self.repository,
                subfolder=self.subfolder,
                revision=self.revision,
                use_safetensors=True,
                local_files_only=local_only,
                output_loading_info=True,
            )
        if report["missing_keys"]:  # diffusers leaves them random, with a warning
            raise UserError(
                f"the weights in {self.source} lack {sorted(report['missing_keys'])[0]}; {remedy}"
            )
        check_values(network.state_dict(), self.source, remedy=remedy)
        return network


def find(name: str, path: str | None, *, local_only: bool) -> Found:
    """The autoencoder of the codec called `name`, from a local folder or hub id instead of its own.

    A hub id is ORG/NAME or ORG/NAME/SUBFOLDER. local_only: no network, the hub's files as
    downloaded before.
    """
    own, expected = AUTOENCODERS[name]
    source = path or own
    if source is None:
        raise UserError(
            f"codec {name} needs the folder or hub id (ORG/NAME, ORG/NAME/vae) of an autoencoder; "
            "give it with --codec.path"
        )
    repository, subfolder = _place(source)
    with _errors_in_one_line(source):
        config, revision = _diffusers_class("AutoencoderKL").load_config(
            repository, subfolder=subfolder, local_files_only=local_only, return_commit_hash=True
        )
    class_name = config.get("_class_name") if isinstance(config, dict) else None
    if class_name not in list(KINDS):  # as JSON it may be anything
        raise UserError(
            f"the autoencoder {source!r} is of the class {brief(class_name, 80)}; a codec can be "
            f"{', '.join(KINDS)}"
        )
    if expected not in (None, class_name):
        raise UserError(
            f"codec {name} is an {expected}, the autoencoder {source!r} an {class_name}; use "
            "--codec.name diffusers for it"
        )
    return Found(source, repository, subfolder, revision, config)


def build(config: dict) -> nn.Module:
    """The autoencoder of a configuration without its weights."""
    return _diffusers_class(config["_class_name"]).from_config(config)


def _diffusers_class(name: str) -> type:
    """The class of diffusers called `name`, a key of `KINDS`."""
    # Imported here: diffusers takes seconds, and pixels need none of it.
    import diffusers

    # What it logs of a failure it also raises.
    logging.getLogger("diffusers").setLevel(logging.CRITICAL)
    return getattr(diffusers, name)


def _place(source: str) -> tuple[str, str | None]:
    """Repository and sub-folder. Pipelines on the hub keep their autoencoder in ORG/NAME/vae."""
    parts = source.split("/")
    if Path(source).is_dir() or Path(source).is_absolute() or len(parts) < 3:
        return source, None
    return "/".join(parts[:2]), "/".join(parts[2:])


@contextmanager
def _errors_in_one_line(source: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():  # of arguments that diffusers still gives to the hub
            warnings.filterwarnings("ignore", module="huggingface_hub")
            yield
    except Exception as error:  # diffusers raises OSError, ValueError, hub and HTTP errors
        from huggingface_hub.errors import LocalEntryNotFoundError

        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error.__context__, LocalEntryNotFoundError):
            reason = "it is not on this machine, and the hub was not asked or not reached"
        raise UserError(
            f"cannot load the autoencoder {source!r} ({reason}); give a local folder with "
            "--codec.path (sampling: --codec-path, grids: --preview.decoder), or train on pixels: "
            "--codec.name identity"
        ) from None


# Images per call: at 256 pixels a larger batch takes tens of gigabytes and is no faster.
AT_ONCE = 16


class NonFiniteLatents(UserError):
    """rows: which images of the batch the encoder turned into infinities or NaN."""

    def __init__(self, rows: list[int]):
        super().__init__(
            f"the autoencoder returned non-finite latents for the images {rows} of the batch; "
            "check them and its weights"
        )
        self.rows = rows


class AutoencoderCodec:
    """Runs in fp32 (fp16 encoders return NaN), as many images at once as fit."""

    def __init__(
        self, vae: AutoencoderKL | AutoencoderTiny | AutoencoderDC, origin: dict | None = None
    ):
        self.origin = origin or {}
        self.vae = vae.float().eval().requires_grad_(False)
        self.kind = choose("autoencoder class", type(vae).__name__, KINDS)
        self.draws_noise = self.kind.draws_noise
        self.factor = self.kind.factor(vae.config)
        self.normalisation = Normalisation.of_autoencoder(vae.config)
        self.at_once = AT_ONCE

    @classmethod
    def load(
        cls,
        name: str,
        path: str | None,
        *,
        local_only: bool = False,
        scale: float | None = None,
        shift: float | None = None,
    ) -> AutoencoderCodec:
        """The codec called `name`; see `find`.

        scale, shift: instead of those of its configuration, in which they are put down: an export
        of the codec has them too.
        """
        found = find(name, path, local_only=local_only)
        vae = found.load(local_only=local_only)
        shifts = "shift_factor" in vae.config and vae.config.get("latents_mean") is None
        if shift is not None and not shifts:
            raise UserError(
                f"codec.shift {shift} has no effect: the autoencoder {found.source!r} has no "
                "shift_factor, or shifts every channel by its own latents_mean; drop it"
            )
        factors = {"scaling_factor": scale, "shift_factor": shift}
        vae.register_to_config(**{key: x for key, x in factors.items() if x is not None})
        return cls(vae, found.origin)

    @cached_property
    def identity(self) -> dict:
        """Values that distinguish this autoencoder from another."""
        digest = {"sha256": _digest(self.vae)}
        return {"name": self.kind.name} | self.normalisation.record() | digest

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of an image to (c, h, w) of its latents; UserError if it is not for these C."""
        channels, height, width = image_shape
        if channels != self.vae.config.in_channels:
            raise UserError(
                f"the autoencoder encodes images of {self.vae.config.in_channels} channels, these "
                f"have {channels}; use --codec.name identity or other images"
            )
        return self.vae.config.latent_channels, height // self.factor, width // self.factor

    def image_shape(self, latent_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(c, h, w) of latents to (H, W, C) of the decoded image."""
        _, height, width = latent_shape
        return height * self.factor, width * self.factor, self.vae.config.in_channels

    def encode(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """A draw of the posterior with the given standard normal noise (latent shape)."""
        return self.latents(self.moments(images), noise)

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Raw latents, fp32 (B, c, h, w), or their means and log-variances (B, 2c, h, w)."""
        self.vae.to(images.device)
        moments = self._in_parts(
            lambda part: self.kind.moments(self.vae.encode(part)),
            images.float(),
            sides=images.shape[2:],
        )
        finite = moments.isfinite().flatten(1).all(dim=1)
        if not finite.all():
            raise NonFiniteLatents((~finite).nonzero().flatten().tolist())
        return moments

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Normalised latents (B, c, h, w) of moments that may come from a cache."""
        return draw_latents(moments, noise if self.draws_noise else None, self.normalisation)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, C, H, W), which may leave [-1, 1] a little."""
        self.vae.to(latents.device)
        return self._in_parts(
            lambda part: self.vae.decode(part).sample,
            self.normalisation.undo(latents.float()),
            sides=self.image_shape(latents.shape[1:])[:2],
        )

    def _in_parts(
        self, run: Callable[[Tensor], Tensor], batch: Tensor, *, sides: tuple[int, int]
    ) -> Tensor:
        """`run` on parts of the batch that fit in memory; the size that did is remembered.

        sides: of the images, in pixels.
        """
        parts, start = [], 0
        while start < len(batch):
            part = batch[start : start + self.at_once]
            result = _unless_out_of_memory(run, part)
            if result is not None:
                parts.append(result)
                start += len(part)
            elif len(part) == 1:
                raise UserError(
                    f"a single image of {sides[0]} x {sides[1]} pixels does not fit in what the "
                    f"autoencoder finds free on {batch.device}; stop other programs there, use a "
                    "smaller batch_size or smaller images"
                )
            else:
                self.at_once = len(part) // 2
        return torch.cat(parts)


def _unless_out_of_memory(run: Callable[[Tensor], Tensor], part: Tensor) -> Tensor | None:
    """None: it did not fit. Nothing of the failed call is kept: the error holds its tensors."""
    try:
        return run(part)
    except torch.OutOfMemoryError:
        return None


def _digest(vae: torch.nn.Module) -> str:
    """SHA-256 of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
