"""Autoencoders of diffusers from a folder or the hub: those classes whose latents we know."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sit_vit5.errors import UserError, brief
from sit_vit5.tensors import check_values, read_diffusers


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
