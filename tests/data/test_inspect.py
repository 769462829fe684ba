"""What `sit_vit5.analysis.inspect_data` says of images and of latent caches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_latent_cache import ALONE, job

from sit_vit5.codecs import build_codec
from sit_vit5.commands import encode as encode_command
from sit_vit5.commands.inspect import main
from sit_vit5.data import encode as encoding
from sit_vit5.data.latent_cache import LatentCache, verify
from sit_vit5.data.loader import posterior_noise
from sit_vit5.utils.errors import UserError


@pytest.fixture
def cache(tmp_path, image_folder, tiny_vae) -> Path:
    encoding.encode(job(tmp_path / "cache", image_folder, tiny_vae), ALONE)
    return tmp_path / "cache"


@pytest.fixture
def inspect(tmp_path, capsys):
    """Runs the command and returns what it printed."""

    def run(*options: object) -> str:
        capsys.readouterr()
        main([str(word) for word in ("--out", tmp_path / "out.png", *options)])
        return capsys.readouterr().out

    return run


def test_classes_counts_and_sizes_are_listed_with_a_picture(inspect, image_folder, tmp_path):
    (image_folder / "dog" / "11.png").unlink()
    Image.new("RGB", (640, 480)).save(image_folder / "dog" / "wide.png")
    said = inspect("--data.path", image_folder, "--data.image-size", 20)
    assert "folder: 24 images, 2 classes" in said
    assert "0 cat                             12   00.png, 01.png, 02.png" in said
    assert "images per class: 12 (cat) to 12 (cat)" in said
    assert "width: 16 to 640, median 16" in said and "height: 20 to 480, median 20" in said
    assert "warning: 23 are smaller than 20 pixels and are enlarged" in said
    assert said.splitlines()[-1] == str(tmp_path / "out.png")
    width, height = Image.open(tmp_path / "out.png").size
    assert width > 4 * 64 and 2 * 64 < height < 3 * 64 + 40


def test_uneven_classes_and_bad_images_are_said(inspect, image_folder):
    for file in sorted((image_folder / "dog").iterdir())[1:]:
        file.unlink()
    (image_folder / "cat" / "05.png").write_bytes(b"broken")
    said = inspect("--data.path", image_folder, "--data.image-size", 8)
    assert "images per class: 1 (dog) to 12 (cat)" in said
    assert "warning: the classes are very uneven" in said
    assert "warning: 1 cannot be decoded:" in said and "05.png" in said
    with pytest.raises(UserError, match="1 of 13 images cannot be decoded; remove them"):
        inspect("--data.path", image_folder, "--data.image-size", 8, "--verify", True)
    few = inspect("--data.path", image_folder, "--data.image-size", 8, "--sample", 3)
    assert "decoded: 3 images" in few or "decoded: 2 images" in few


def test_a_cache_is_described_and_decoded_if_its_codec_is_here(inspect, cache, tiny_vae, tmp_path):
    said = inspect("--data.path", cache)
    assert "latents: 24 images, 2 classes" in said
    assert "cache: 2 mirrors x 8 x 4 x 4 float32, 3 shards" in said
    assert "warning: the deviation is unusual" in said  # the tiny autoencoder's is 0.2
    assert "no picture: the autoencoder is not on this machine" in said
    assert not (tmp_path / "out.png").exists()
    said = inspect("--data.path", cache, "--codec.path", tmp_path)
    assert f"no picture: the autoencoder is not what --codec.path {tmp_path} names" in said
    said = inspect("--data.path", cache, "--codec.path", tiny_vae, "--verify", True)
    assert "verified: 3 shards are as written, all numbers are finite" in said
    assert Image.open(tmp_path / "out.png").size[0] > 4 * 64


def test_the_scale_that_inspect_names_gives_unit_deviation(inspect, cache, tiny_vae):
    said = inspect("--data.path", cache)
    channels = [line for line in said.splitlines() if line.startswith("  channel ")]
    assert len(channels) == 4 and "0.18215" not in said
    scale = said.split("scaling_factor ")[1].split()[0]
    for path in ([], ["--codec.path", tiny_vae]):
        better = inspect("--data.path", cache, "--codec.scale", scale, *path)
        assert "standard deviation 1.000, expected 0.5 to 2.0" in better
        assert "warning" not in better
    raw = LatentCache(cache).raw_latents
    shifted = inspect("--data.path", cache, "--codec.scale", scale, "--codec.shift", raw.mean[1])
    line = next(line for line in shifted.splitlines() if "channel 1:" in line)
    assert abs(float(line.split("mean ")[1].split(",")[0])) < 0.001


@pytest.mark.parametrize(("level", "warned"), [(128, True), (None, False)])
def test_pixels_are_measured_on_a_scale_of_their_own(
    inspect, image_folder, tmp_path, level, warned
):
    for file in image_folder.rglob("*.png") if level else ():
        Image.new("RGB", (16, 20), (level,) * 3).save(file)
    cache = tmp_path / "pixels"
    options = ["--data.path", str(image_folder), "--data.image-size", "8", "--data.workers", "0"]
    encode_command.main([*options, "--codec.name", "identity", "--out", str(cache)])
    said = inspect("--data.path", cache)
    assert "expected 0.1 to 1.0" in said and "scaling_factor" not in said
    assert ("the images are dark or flat" in said) == warned


def test_statistics_are_those_of_the_normalised_latents(inspect, cache, tiny_vae):
    codec = build_codec("sd-vae-ema", str(tiny_vae))
    stored = LatentCache(cache)
    noise = posterior_noise(0, (4, 4, 4), 0, range(1200))
    draws = []
    for mirror in (False, True):
        moments, _ = stored.batch(np.tile(np.arange(24), 50), np.full(1200, mirror))
        draws.append(codec.latents(torch.from_numpy(moments), noise))
    std = torch.cat(draws).std().item()
    said = inspect("--data.path", cache)
    (line,) = [line for line in said.splitlines() if line.startswith("latents: mean")]
    assert float(line.split("deviation ")[1].split(",")[0]) == pytest.approx(std, rel=0.01)


def test_verify_names_a_changed_shard_and_values_that_are_not_finite(inspect, cache):
    assert verify(LatentCache(cache), shown=False) == []
    numbers = np.memmap(cache / "shard_00001.bin", np.float32, "r+")
    numbers[7] += 1
    numbers.flush()
    (problem,) = verify(LatentCache(cache), shown=False)
    assert "shard_00001.bin was changed" in problem
    numbers[7] = np.nan
    numbers.flush()
    problems = verify(LatentCache(cache), shown=False)
    assert len(problems) == 2 and "holds 1 values that are not finite" in problems[1]
    with pytest.raises(UserError, match=r"shard_00001.bin was changed.*\(and 1 more such\)"):
        inspect("--data.path", cache, "--verify", True)


def test_an_unfinished_cache_and_a_bad_output_are_refused(inspect, cache, capsys):
    index = json.loads((cache / "index.json").read_text())
    assert index["count"] == 24
    (cache / "index.json").unlink()
    with pytest.raises(UserError, match="is not complete; run its encoding again"):
        inspect("--data.path", cache)
    with pytest.raises(UserError, match=r"out picture.jpg must end in .png"):
        main(["--data.path", str(cache), "--out", "picture.jpg"])


def test_inspect_writes_no_image_of_the_data(image_folder):
    image = image_folder / "cat" / "00.png"
    before = image.read_bytes()
    with pytest.raises(UserError, match="00.png lies in the data folder"):
        main(["--data.path", str(image_folder), "--out", str(image)])
    assert image.read_bytes() == before


def test_inspect_refuses_what_training_refuses(inspect, image_folder):
    Image.new("RGB", (60000, 1)).save(image_folder / "dog" / "line.png")
    said = inspect("--data.path", image_folder, "--data.image-size", 256)
    assert "warning: 1 cannot be decoded:" in said and "60000x1 is too narrow" in said
    with pytest.raises(UserError, match="1 of 25 images cannot be decoded"):
        inspect("--data.path", image_folder, "--data.image-size", 256, "--verify", True)
