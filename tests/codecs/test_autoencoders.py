"""Every sort of autoencoder as a codec: diffusers' own calls and formulas say what is right."""

from __future__ import annotations

import json
import math

import pytest
import torch
from autoencoders import BUILDERS, MEAN, STD, kl, random_autoencoder
from torch import Tensor, nn

from sit_vit5.codecs import build_codec
from sit_vit5.codecs.autoencoder import AT_ONCE, KINDS, AutoencoderCodec, NonFiniteLatents
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.utils.errors import UserError


def images(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 8, 12, generator=generator) * 2 - 1


def raw_latents(vae: nn.Module, pixels: Tensor) -> Tensor:
    """As diffusers' pipelines ask (`retrieve_latents`, `AutoencoderDC.encode`)."""
    encoded = vae.encode(pixels)
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mode()
    return encoded.latents if hasattr(encoded, "latents") else encoded.latent


def normalised(sort: str, raw: Tensor) -> Tensor:
    """By the formulas of diffusers' pipelines for Stable Diffusion, SD 3, SDXL, TAESD and Sana."""
    mean, std = (torch.tensor(numbers).view(1, 4, 1, 1) for numbers in (MEAN, STD))
    formulas = {
        "scale": lambda: 0.18215 * raw,
        "shift": lambda: (raw - 0.0609) * 1.5305,
        "channels": lambda: (raw - mean) * 0.5 / std,
        "tiny": lambda: raw,
        "dc": lambda: raw * 0.41407,
    }
    return formulas[sort]()


@pytest.mark.parametrize("sort", BUILDERS)
@torch.no_grad()
def test_latents_are_what_diffusers_pipelines_would_feed_a_model(folders, sort):
    codec, vae = build_codec("diffusers", folders[sort]), random_autoencoder(sort)
    shape = codec.latent_shape((3, 8, 12))
    latents = codec.encode(images(), torch.zeros(2, *shape))
    raw = raw_latents(vae, images())
    assert latents.shape[1:] == shape and codec.image_shape(shape) == (8, 12, 3)
    torch.testing.assert_close(latents, normalised(sort, raw))
    torch.testing.assert_close(codec.decode(latents), vae.decode(raw).sample)


@pytest.mark.parametrize("sort", BUILDERS)
def test_the_second_half_needs_no_network_and_the_noise_only_of_a_posterior(folders, sort):
    codec = build_codec("diffusers", folders[sort])
    recorded = RecordedCodec.of(codec, "diffusers")
    shape = codec.latent_shape((3, 8, 12))
    recorded = RecordedCodec.read(json.loads(json.dumps(recorded.record())), channels=shape[0])
    noise = torch.randn(2, *shape)
    moments, latents = codec.moments(images()), codec.encode(images(), noise)
    assert torch.equal(codec.latents(moments, noise), latents)
    assert torch.equal(recorded.latents(moments, noise), latents)
    assert codec.draws_noise == (sort in ("scale", "shift", "channels"))
    assert moments.shape[1] == latents.shape[1] * (2 if codec.draws_noise else 1)
    assert codec.draws_noise != torch.equal(codec.encode(images(), 0 * noise), latents)


def test_identities_record_what_normalises_and_stable_diffusions_is_as_ever(folders):
    identities = {sort: build_codec("diffusers", folders[sort]).identity for sort in BUILDERS}
    for identity in identities.values():
        assert len(identity.pop("sha256")) == 64
    channels = {"scale": [0.25, 1.0, 0.5, 0.125], "shift": MEAN}
    assert identities == {
        "scale": {"name": "autoencoder_kl", "scale": 0.18215},
        "shift": {"name": "autoencoder_kl", "scale": 1.5305, "shift": 0.0609},
        "channels": {"name": "autoencoder_kl"} | channels,
        "tiny": {"name": "autoencoder_tiny", "scale": 1.0},
        "dc": {"name": "autoencoder_dc", "scale": 0.41407},
    }
    one, other = (build_codec(name, folders["scale"]) for name in ("sd-vae-ema", "diffusers"))
    assert one.identity == other.identity


@pytest.mark.parametrize(
    ("class_name", "levels", "factor"),
    # dc-ae-f32c32-sana, sd-vae-ft-ema, taesd.
    [("AutoencoderDC", 6, 32), ("AutoencoderKL", 4, 8), ("AutoencoderTiny", 4, 8)],
)
def test_published_autoencoders_have_their_factors(class_name, levels, factor):
    kind = KINDS[class_name]
    assert kind.factor({kind.levels: [64] * levels}) == factor


def smooth_images() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    small = torch.rand(4, 3, 2, 2, generator=generator) * 1.6 - 0.8
    return nn.functional.interpolate(small, (8, 8), mode="bilinear")


def fitted_autoencoder() -> nn.Module:
    """An AutoencoderKL that has learned `smooth_images`."""
    torch.manual_seed(0)
    vae = kl(latents_mean=MEAN, latents_std=STD)
    optimizer = torch.optim.Adam(vae.parameters(), 1e-2)
    for _ in range(75):
        error = vae.decode(vae.encode(smooth_images()).latent_dist.mean).sample - smooth_images()
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
    return vae


def psnr(error: Tensor) -> float:
    """Of images in [-1, 1], in dB."""
    return 10 * math.log10(4 / error.square().mean().item())


def test_a_round_trip_gives_the_images_back():
    codec = AutoencoderCodec(fitted_autoencoder())
    moments = codec.moments(smooth_images())
    latents = codec.latents(moments, torch.zeros(4, 4, 4, 4))
    assert psnr(codec.decode(latents) - smooth_images()) > 25
    # Row D5: latents that were not normalised, de-normalised all the same.
    assert psnr(codec.decode(moments.chunk(2, dim=1)[0]) - smooth_images()) < 16


def test_out_of_memory_halves_what_is_done_at_once_and_is_remembered(folders, monkeypatch):
    codec = build_codec("diffusers", folders["tiny"])
    whole = codec.encode(images(11), None)
    pixels = codec.decode(whole)
    sizes = limit_memory(codec, monkeypatch, 3)
    torch.testing.assert_close(codec.encode(images(11), None), whole)
    assert sizes == [11, 5, 2, 2, 2, 2, 2, 1] and codec.at_once == 2
    torch.testing.assert_close(codec.decode(whole), pixels)
    assert sizes[8:] == [2, 2, 2, 2, 2, 1]
    assert build_codec("diffusers", folders["tiny"]).at_once == AT_ONCE


def test_no_memory_for_one_image_is_said_in_one_line(folders, monkeypatch):
    codec = build_codec("diffusers", folders["tiny"])
    latents = codec.encode(images(), None)
    limit_memory(codec, monkeypatch, 0)
    for call in (lambda: codec.encode(images(), None), lambda: codec.decode(latents)):
        with pytest.raises(UserError, match="single image of 8 x 12 pixels") as error:
            call()
        assert "\n" not in str(error.value)


def limit_memory(codec: AutoencoderCodec, monkeypatch, limit: int) -> list[int]:
    """A device that has no room for more than `limit` images; returns what was tried."""
    sizes = []

    def limited(run):
        def call(batch: Tensor):
            sizes.append(len(batch))
            if len(batch) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(batch)

        return call

    monkeypatch.setattr(codec.vae, "encode", limited(codec.vae.encode))
    monkeypatch.setattr(codec.vae, "decode", limited(codec.vae.decode))
    return sizes


@pytest.mark.parametrize("sort", BUILDERS)
def test_non_finite_latents_name_their_images(folders, sort):
    codec, bad = build_codec("diffusers", folders[sort]), images(5)
    bad[1, 0, 0, 0], bad[4, 2, 3, 3] = math.nan, math.inf
    codec.at_once = 2
    with pytest.raises(NonFiniteLatents, match=r"images \[1, 4\] of the batch") as error:
        codec.moments(bad)
    assert error.value.rows == [1, 4]


def test_grey_images_are_refused_before_any_is_encoded(folders):
    with pytest.raises(UserError, match="images of 3 channels, these have 1; use"):
        build_codec("diffusers", folders["dc"]).latent_shape((1, 8, 12))
