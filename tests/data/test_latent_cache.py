"""Encoding a data set once, and training from what was written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sit_vit5.codecs import build_codec
from sit_vit5.config import EncodeConfig
from sit_vit5.config.parse import parse
from sit_vit5.data import build_source
from sit_vit5.data import encode as encoding
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.data.loader import StepLoader, from_uint8, posterior_noise
from sit_vit5.utils.distributed import BatchPlan, Processes
from sit_vit5.utils.errors import UserError

ALONE = Processes(0, 1, torch.device("cpu"), lambda: None)


def job(out: Path, images: Path, vae: Path, *options: object) -> encoding.Job:
    """The encoding of these images by the tiny autoencoder, as the command would build it."""
    settings = {
        "--out": out, "--data.path": images, "--data.image-size": 8, "--data.workers": 0,
        "--codec.name": "sd-vae-ema", "--codec.path": vae, "--batch-size": 4, "--shard-size": 10,
    }  # fmt: skip
    settings |= dict(zip(options[::2], options[1::2], strict=True))
    config = parse(EncodeConfig, [str(word) for pair in settings.items() for word in pair])
    source, codec = build_source(config.data), build_codec(config.codec.name, config.codec.path)
    return encoding.Job(config, source, codec, encoding.plan_layout(config, source, codec))


@pytest.fixture
def cache(tmp_path, image_folder, tiny_vae) -> Path:
    """The 24 images in shards of 10, 10 and 4."""
    encoding.encode(job(tmp_path / "cache", image_folder, tiny_vae), ALONE)
    return tmp_path / "cache"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pixels(image_folder: Path, codec_path: Path) -> tuple[torch.Tensor, object]:
    source = job(Path("unused"), image_folder, codec_path).source
    items = np.stack([source.load(index)[0] for index in range(len(source))])
    return from_uint8(torch.from_numpy(items)), build_codec("sd-vae-ema", str(codec_path))


def test_a_cache_holds_the_moments_of_every_image_and_of_its_mirror(cache, image_folder, tiny_vae):
    images, codec = pixels(image_folder, tiny_vae)
    stored = LatentCache(cache)
    everything = np.arange(24)
    plain, labels = stored.batch(everything, np.zeros(24, bool))
    mirrored, _ = stored.batch(everything, np.ones(24, bool))
    torch.testing.assert_close(torch.from_numpy(plain), codec.moments(images))
    torch.testing.assert_close(torch.from_numpy(mirrored), codec.moments(images.flip(-1)))
    # The latent of the mirrored image is not the mirrored latent.
    assert np.abs(mirrored - plain[..., ::-1]).max() > 0.05
    assert labels.tolist() == [0] * 12 + [1] * 12
    assert (stored.class_names, stored.item_shape) == (("cat", "dog"), (4, 4, 4))


def test_a_batch_may_ask_for_any_order_across_shards(cache):
    stored = LatentCache(cache)
    order, mirrored = np.array([23, 0, 10, 9, 0, 19]), np.array([1, 0, 0, 1, 1, 0], bool)
    moments, labels = stored.batch(order, mirrored)
    for place, (index, mirror) in enumerate(zip(order, mirrored, strict=True)):
        alone, label = stored.batch(np.array([index]), np.array([mirror]))
        assert (moments[place] == alone[0]).all() and labels[place] == label[0]


def test_draws_have_the_mean_and_variance_of_the_posterior(cache, tiny_vae):
    stored, codec = LatentCache(cache), build_codec("sd-vae-ema", str(tiny_vae))
    moments, _ = stored.batch(np.zeros(4000, int), np.zeros(4000, bool))
    noise = posterior_noise(0, (4, 4, 4), 0, range(4000))
    draws = codec.latents(torch.from_numpy(moments), noise)
    mean, log_variance = torch.from_numpy(moments[0]).chunk(2)
    std = 0.18215 * torch.exp(0.5 * log_variance)
    assert ((draws.mean(0) - 0.18215 * mean).abs() < 5 * std / 4000**0.5).all()
    torch.testing.assert_close(draws.std(0), std, rtol=0.06, atol=0)


def test_training_sees_the_latents_that_encoding_on_the_way_gives(cache, image_folder, tiny_vae):
    _, codec = pixels(image_folder, tiny_vae)
    plan = BatchPlan(16)
    options = {"seed": 3, "horizontal_flip": True}
    online = StepLoader(job(cache, image_folder, tiny_vae).source, plan, **options)
    cached = StepLoader(LatentCache(cache), plan, posterior=codec, **options)
    for step in (0, 1, 5):
        images, latents = online[(step, 0)], cached[(step, 0)]
        noise = posterior_noise(3, (4, 4, 4), step, range(16))
        torch.testing.assert_close(latents.images, codec.encode(images.images, noise))
        assert (latents.labels == images.labels).all()
    again = cached[(5, 0)]
    assert (again.images == latents.images).all()
    parts = [
        StepLoader(cached.source, BatchPlan(16, 2, 2, rank), posterior=codec, **options)[(5, micro)]
        for micro in range(2)
        for rank in range(2)
    ]
    assert (torch.cat([part.images for part in parts]) == latents.images).all()
    ahead = StepLoader(cached.source, plan, posterior=codec, workers=2, **options).steps(5)
    assert (next(ahead)[0].images == latents.images).all()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("images_before", [1, 4, 10, 13, 22])
def test_a_killed_encoding_makes_only_what_is_missing(
    cache, tmp_path, image_folder, tiny_vae, images_before, monkeypatch
):
    begun = job(tmp_path / "begun", image_folder, tiny_vae, "--batch-size", 1)
    moments, calls = begun.codec.moments, []

    def dies(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) > 2 * images_before:  # the image and its mirror
            raise Killed
        return moments(images)

    begun.codec.moments = dies
    with pytest.raises(Killed):
        encoding.encode(begun, ALONE)
    for partial in begun.folder.glob("*.partial"):  # the last write was cut
        with partial.open("ab") as file:
            file.write(b"half an image")
    with pytest.raises(UserError, match="not complete; run its encoding again"):
        LatentCache(begun.folder)

    rest = job(tmp_path / "begun", image_folder, tiny_vae, "--batch-size", 1)
    count = []
    rest.codec.moments = lambda images: count.append(len(images)) or moments(images)
    encoding.encode(rest, ALONE)
    assert sum(count) == 2 * (24 - images_before)
    whole = LatentCache(cache)
    assert np.allclose(
        LatentCache(begun.folder).batch(np.arange(24), np.ones(24, bool))[0],
        whole.batch(np.arange(24), np.ones(24, bool))[0],
        atol=1e-5,
    )


def test_a_kill_between_a_shard_and_its_facts_costs_nothing(cache, image_folder, tiny_vae):
    before = content(cache)
    for name in ("shard_00001.json", "index.json"):
        (cache / name).unlink()
    again = job(cache, image_folder, tiny_vae)
    again.codec.moments = None  # a call would fail
    encoding.encode(again, ALONE)
    assert content(cache) == before


def test_two_processes_write_what_one_writes(cache, tmp_path, image_folder, tiny_vae, command):
    shared = [
        "--data.path", image_folder, "--data.image-size", 8, "--data.workers", 1,
        "--codec.name", "sd-vae-ema", "--codec.path", tiny_vae, "--batch-size", 4,
        "--shard-size", 10,
    ]  # fmt: skip
    both = tmp_path / "both"
    shown = command("encode", *shared, "--out", both, processes=2)
    assert shown.stdout.splitlines()[-1] == str(both)
    assert "24 images of 2 classes, 2 mirrors x 8 x 4 x 4 float32, 3 shards" in shown.stdout
    assert LatentCache(both).identity == LatentCache(cache).identity
    again = command("encode", *shared, "--out", both)
    assert "complete already" in again.stdout


def test_other_settings_are_refused_with_both_values(cache, image_folder, tiny_vae):
    before = content(cache)
    cases = {
        ("--data.image-size", 16): "image_size: 8 -> 16",
        ("--dtype", "float16"): "dtype: float32 -> float16",
        ("--data.horizontal-flip", "False"): "mirrors: 2 -> 1",
        ("--codec.name", "sd-vae-mse"): "codec.name: sd-vae-ema -> sd-vae-mse",
    }
    for options, message in cases.items():
        with pytest.raises(UserError, match=rf"holds a latent cache with other .*{message}"):
            encoding.encode(job(cache, image_folder, tiny_vae, *options), ALONE)
    assert content(cache) == before


def test_a_reader_refuses_what_does_not_fit(cache, image_folder, tiny_vae, tmp_path):
    with pytest.raises(UserError, match="images of 8 pixels, data.image_size is 256"):
        LatentCache(cache, image_size=256)
    with pytest.raises(UserError, match="is no latent cache"):
        LatentCache(tmp_path)
    encoding.encode(
        job(tmp_path / "one", image_folder, tiny_vae, "--data.horizontal-flip", "False"), ALONE
    )
    with pytest.raises(UserError, match="no mirrored images; use --data.horizontal-flip False"):
        LatentCache(tmp_path / "one", mirrored=True)
    assert LatentCache(tmp_path / "one").mirrors == 1

    index = json.loads((cache / "index.json").read_text())
    (cache / "index.json").write_text(json.dumps(index | {"schema": 0}))
    with pytest.raises(UserError, match="has schema 0, this version reads 1"):
        LatentCache(cache)
    (cache / "index.json").write_text(json.dumps(index))
    with (cache / "shard_00002.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"shard_00002.bin holds 4100 bytes, not 4096"):
        LatentCache(cache)
    (cache / "shard_00002.bin").unlink()
    with pytest.raises(UserError, match=r"shard_00002.bin is missing"):
        LatentCache(cache)
    (cache / "labels.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"labels.npy is missing or was changed"):
        LatentCache(cache)


def test_bad_images_stop_the_encoding_or_are_left_out_and_listed(
    tmp_path, image_folder, tiny_vae, monkeypatch
):
    for name in ("cat/03.png", "cat/09.png", "dog/11.png"):
        (image_folder / name).write_bytes(b"broken")
    with pytest.raises(UserError, match=r"03.png: cannot be decoded.*on-bad-image skip"):
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae), ALONE)
    skip = ("--data.on-bad-image", "skip")
    with pytest.raises(UserError, match=r"3 of 24 images cannot be decoded, more than 1%"):
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae, *skip), ALONE)
    monkeypatch.setattr("sit_vit5.data.cache_writer.MAX_BAD", 0.5)
    encoding.encode(job(tmp_path / "c", image_folder, tiny_vae, *skip), ALONE)
    stored = LatentCache(tmp_path / "c")
    assert len(stored) == 21 and stored.labels.tolist() == [0] * 10 + [1] * 11
    listed = (tmp_path / "c" / "bad_images.txt").read_text().splitlines()
    assert [Path(line.split(":")[0]).name for line in listed] == ["03.png", "09.png", "11.png"]
    images, codec = pixels_of_good(image_folder, tiny_vae)
    moments, _ = stored.batch(np.arange(21), np.zeros(21, bool))
    torch.testing.assert_close(torch.from_numpy(moments), codec.moments(images))


def pixels_of_good(image_folder: Path, vae: Path) -> tuple[torch.Tensor, object]:
    for file in list(image_folder.rglob("*.png")):
        if file.stat().st_size < 10:
            file.unlink()
    return pixels(image_folder, vae)


def test_latents_that_are_not_finite_stop_the_encoding_with_the_files_name(
    tmp_path, image_folder, tiny_vae
):
    (image_folder / "cat" / "00.png").write_bytes(b"broken")
    begun = job(tmp_path / "c", image_folder, tiny_vae, "--data.on-bad-image", "skip")
    encode_one = begun.codec.vae.encode

    def poisoned(images: torch.Tensor):
        found = encode_one(images)
        found.latent_dist.mean[1] = float("nan")
        return found

    begun.codec.vae.encode = poisoned
    with pytest.raises(UserError, match=r"sd-vae-ema gives latents .* for \S*cat/02.png; check"):
        encoding.encode(begun, ALONE)
    assert not list(begun.folder.glob("*.partial")) and not (begun.folder / "index.json").exists()


def test_float16_halves_the_disk_and_rounds_to_three_digits(
    cache, tmp_path, image_folder, tiny_vae
):
    encoding.encode(job(tmp_path / "half", image_folder, tiny_vae, "--dtype", "float16"), ALONE)
    exact, half = (LatentCache(path) for path in (cache, tmp_path / "half"))
    sizes = [(p / "shard_00000.bin").stat().st_size for p in (tmp_path / "half", cache)]
    assert 2 * sizes[0] == sizes[1]
    everything = np.arange(24), np.zeros(24, bool)
    assert half.batch(*everything)[0].dtype == np.float32
    np.testing.assert_allclose(half.batch(*everything)[0], exact.batch(*everything)[0], rtol=5e-4)


def test_the_index_states_mean_and_deviation_of_the_latents(cache):
    stored = LatentCache(cache)
    both = np.stack([stored.batch(np.arange(24), np.full(24, m))[0] for m in (False, True)])
    mean, log_variance = np.split(both.astype(np.float64), 2, axis=2)
    axes = (0, 1, 3, 4)
    variance = mean.var(axes) + np.exp(log_variance).mean(axes)
    np.testing.assert_allclose(stored.raw_latents.mean, mean.mean(axes), rtol=1e-9)
    np.testing.assert_allclose(stored.raw_latents.std, np.sqrt(variance), rtol=1e-9)


def test_a_small_disk_and_a_second_encoder_are_said_before_the_work(
    tmp_path, image_folder, tiny_vae, monkeypatch
):
    from sit_vit5.utils.files import lock

    with lock(tmp_path / "c", "encoding"), pytest.raises(UserError, match="another encoding"):
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae), ALONE)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"24 images need 24.6 KB, .* use --dtype float16"):
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae), ALONE)
    assert not (tmp_path / "c" / "encoding.json").exists()


def test_images_that_the_codec_cannot_halve_are_refused(image_folder, tiny_vae, tmp_path):
    with pytest.raises(
        UserError, match="image_size 9 is not divisible by .* factor 2; use 8 or 10"
    ):
        job(tmp_path, image_folder, tiny_vae, "--data.image-size", 9)


def test_a_cache_of_pixels_needs_no_noise(tmp_path, image_folder, tiny_vae):
    config = parse(
        EncodeConfig,
        f"--out {tmp_path / 'c'} --data.source digits --data.image-size 8 --data.workers 0 "
        "--codec.name identity".split(),
    )
    source, codec = build_source(config.data), build_codec("identity")
    layout = encoding.plan_layout(config, source, codec)
    encoding.encode(encoding.Job(config, source, codec, layout), ALONE)
    stored = LatentCache(tmp_path / "c")
    moments, labels = stored.batch(np.arange(1437), np.zeros(1437, bool))
    assert (moments[:, 0] == source.images[..., 0] / np.float32(127.5) - 1).all()
    assert (labels == source.labels).all()


def test_encode_train_and_sample_without_and_with_the_autoencoder(
    command, cache, image_folder, tiny_vae, tmp_path
):
    def losses(data: Path, *options: object) -> tuple[list[float], str]:
        out = tmp_path / data.name
        shown = command(
            "train_sit.py", "--config", "tests/tiny.yaml", "--output-dir", out,
            "--data.source", "None", "--data.path", data, "--data.horizontal-flip", True,
            "--codec.name", "sd-vae-ema", "--steps", 3, "--preview.every", 3, *options,
        )  # fmt: skip
        lines = (out / "tiny" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines], shown.stdout

    online, _ = losses(image_folder, "--codec.path", tiny_vae)
    cached, shown = losses(cache)
    assert cached == pytest.approx(online, rel=1e-4)
    assert "no grids are drawn" in shown
    run = tmp_path / "cache" / "tiny"
    assert not (run / "samples" / "step_0000003.png").exists()
    resumed = command("train_sit.py", "--resume", run, "--steps", 4, "--codec.path", tiny_vae)
    assert "no grids are drawn" not in resumed.stdout
    assert (run / "samples" / "step_0000004.png").is_file()
    grid = command("sample/grid.py", "--checkpoint", run, "--steps", 1, "--codec-path", tiny_vae)
    assert Path(grid.stdout.strip()).is_file()


def test_training_on_a_cache_of_another_codec_is_refused(command, cache, tmp_path):
    refused = command(
        "train_sit.py", "--config", "tests/tiny.yaml", "--output-dir", tmp_path / "runs",
        "--data.source", "latents", "--data.path", cache, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "encoded with codec.name sd-vae-ema, the configuration says identity" in refused.stderr
