"""Codecs on a tiny autoencoder that the test makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sit_vit5.codecs import build_codec
from sit_vit5.utils.errors import UserError


def test_identity_gives_pixels_back():
    codec, images = build_codec("identity"), torch.randn(2, 3, 4, 6)
    assert (codec.decode(codec.encode(images)) == images).all()
    assert codec.latent_shape((3, 4, 6)) == (3, 4, 6)
    assert codec.image_shape((3, 4, 6)) == (4, 6, 3)
    with pytest.raises(UserError, match="codec.path somewhere has no effect"):
        build_codec("identity", "somewhere")


def test_autoencoder_applies_the_scale_once_in_each_direction(tiny_vae):
    codec = build_codec("sd-vae-ema", str(tiny_vae))
    images = torch.rand(2, 3, 8, 12) * 2 - 1
    latents = codec.encode(images, torch.zeros(2, 4, 4, 6))
    posterior = codec.vae.encode(images).latent_dist
    assert codec.latent_shape((3, 8, 12)) == (4, 4, 6)
    assert codec.image_shape((4, 4, 6)) == (8, 12, 3)
    torch.testing.assert_close(latents, 0.18215 * posterior.mean)
    torch.testing.assert_close(codec.decode(latents), codec.vae.decode(posterior.mean).sample)


def test_large_batches_are_encoded_and_decoded_in_parts(tiny_vae):
    codec = build_codec("sd-vae-ema", str(tiny_vae))
    images, noise = torch.rand(5, 3, 8, 8) * 2 - 1, torch.randn(5, 4, 4, 4)
    whole = codec.encode(images, noise)
    pixels = codec.decode(whole)
    codec.at_once = 2
    torch.testing.assert_close(codec.encode(images, noise), whole)
    torch.testing.assert_close(codec.decode(whole), pixels)


def test_posterior_noise_enters_with_the_standard_deviation(tiny_vae):
    codec = build_codec("sd-vae-mse", str(tiny_vae))
    images, noise = torch.rand(1, 3, 8, 8), torch.randn(1, 4, 4, 4)
    difference = codec.encode(images, noise) - codec.encode(images, 0 * noise)
    std = codec.vae.encode(images).latent_dist.std
    torch.testing.assert_close(difference, 0.18215 * std * noise, atol=1e-6, rtol=1e-4)


def test_identity_of_an_autoencoder_follows_its_weights(tiny_vae, tmp_path):
    from safetensors.torch import load_file, save_file

    first = build_codec("sd-vae-ema", str(tiny_vae))
    assert first.identity == build_codec("sd-vae-mse", str(tiny_vae)).identity
    weights = load_file(tiny_vae / "diffusion_pytorch_model.safetensors")
    weights["quant_conv.bias"] += 1e-3
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text((tiny_vae / "config.json").read_text())
    assert first.identity != build_codec("sd-vae-ema", str(tmp_path)).identity


def test_an_absent_autoencoder_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in (str(tmp_path / "absent"), str(tmp_path)):
        with pytest.raises(UserError, match=r"cannot load the autoencoder.*--codec.path") as error:
            build_codec("sd-vae-ema", path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="unknown codec 'sd-vae'; nearest: sd-vae-"):
        build_codec("sd-vae")


def test_training_sampling_and_decoding_run_on_latents(command, tiny_vae, image_folder, tmp_path):
    options = [
        "--config", "tests/tiny.yaml", "--output-dir", tmp_path, "--data.source", "folder",
        "--data.path", image_folder, "--codec.name", "sd-vae-ema", "--codec.path", tiny_vae,
        "--steps", 2, "--preview.every", 2,
    ]  # fmt: skip
    command("train_sit.py", *options)
    run = tmp_path / "tiny"
    state = json.loads((run / "checkpoints" / "step_0000002" / "state.json").read_text())
    assert (state["in_channels"], state["input_size"]) == (4, [4, 4])
    assert state["codec"] == build_codec("sd-vae-ema", str(tiny_vae)).identity
    assert state["codec_origin"] == {"id": tiny_vae.name}
    assert (run / "samples" / "step_0000002.png").is_file()
    grid = command("sample/grid.py", "--checkpoint", run, "--steps", 1, "--columns", 1)
    assert Path(grid.stdout.strip()).is_file()
    other = command("sample/grid.py", "--checkpoint", run, "--codec-path", tmp_path, check=False)
    assert other.returncode == 2 and "cannot load the autoencoder" in other.stderr
