"""Latent caches under kills, overflow, edited files and folders in the wrong place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_latent_cache import ALONE, content, job

from sit_vit5.analysis.inspect_data import inspect_cache
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.commands import encode as encode_command
from sit_vit5.config import CodecConfig
from sit_vit5.data import encode as encoding
from sit_vit5.data.cache_writer import Layout, ShardWriter, write_index
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.data.loader import StepLoader
from sit_vit5.training.run import open_codec
from sit_vit5.utils.distributed import BatchPlan
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash


@pytest.fixture
def cache(tmp_path, image_folder, tiny_vae) -> Path:
    """The 24 images in shards of 10, 10 and 4."""
    encoding.encode(job(tmp_path / "cache", image_folder, tiny_vae), ALONE)
    return tmp_path / "cache"


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path, image_folder, tiny_vae):
    begun = job(tmp_path / "c", image_folder, tiny_vae, "--dtype", "float16")
    moments = begun.codec.moments

    def large(images: torch.Tensor) -> torch.Tensor:
        found = moments(images)
        found[2, 0, 1, 1] = -70000.0  # in float16: minus infinity
        return found

    begun.codec.moments = large
    with pytest.raises(UserError, match=r"above 65,504, .* for \S*cat/02.png; use --dtype float32"):
        encoding.encode(begun, ALONE)
    assert not list(begun.folder.glob("*.partial"))


def test_a_message_names_a_few_of_many_images(tmp_path, image_folder, tiny_vae):
    begun = job(tmp_path / "c", image_folder, tiny_vae, "--dtype", "float16", "--batch-size", 10)
    begun.codec.moments = lambda images: torch.full((len(images), 8, 4, 4), 1e6)
    with pytest.raises(UserError, match=r"cat/00.png, \S*01.png, \S*02.png and 7 more; use"):
        encoding.encode(begun, ALONE)


LAYOUT = Layout(2, 2, 1, (1, 1, 1), draws_noise=False, dtype="float32")


def test_a_shard_of_bad_images_alone_survives_a_kill_before_its_file_exists(tmp_path):
    (tmp_path / "shard_00000.bad").write_text(json.dumps({"0": "broken", "1": "broken"}))
    writer = ShardWriter(tmp_path, 0, LAYOUT)
    assert writer.missing == []
    writer.finish()
    assert (tmp_path / "shard_00000.bin").read_bytes() == b""
    assert json.loads((tmp_path / "shard_00000.json").read_text())["count"] == 0


def test_an_image_cut_by_a_kill_and_then_bad_leaves_nothing_in_the_shard(tmp_path):
    ShardWriter(tmp_path, 0, LAYOUT).append(np.ones((1, 1, 1, 1, 1)), {})
    with (tmp_path / "shard_00000.bin.partial").open("ab") as file:
        file.write(b"cut")
    (tmp_path / "shard_00000.bad").write_text(json.dumps({"1": "broken"}))
    ShardWriter(tmp_path, 0, LAYOUT).finish()
    assert (tmp_path / "shard_00000.bin").stat().st_size == 4


@pytest.mark.parametrize("separator", ["\r", "\x0b", "\x85", "\u2028", "\t", "\n"])
def test_reasons_of_bad_images_may_hold_any_character(tmp_path, separator):
    reason = f"a{separator}b.png: cannot be decoded"
    ShardWriter(tmp_path, 0, LAYOUT).append(np.ones((1, 1, 1, 1, 1)), {0: reason})
    again = ShardWriter(tmp_path, 0, LAYOUT)
    assert again.bad == {0: reason} and again.missing == []


def test_bad_images_are_listed_before_the_cache_counts_as_complete(
    tmp_path, image_folder, tiny_vae, monkeypatch
):
    (image_folder / "cat" / "03.png").write_bytes(b"broken")
    monkeypatch.setattr("sit_vit5.data.cache_writer.MAX_BAD", 0.5)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sit_vit5.data.cache_writer.write_index", killed)
    with pytest.raises(KeyboardInterrupt):
        skip = ("--data.on-bad-image", "skip")
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae, *skip), ALONE)
    assert "03.png" in (tmp_path / "c" / "bad_images.txt").read_text()


def test_equal_images_have_deviation_zero(tmp_path):
    """Their squares' mean can round to less than their mean squared."""
    layout = Layout(1437, 2000, 1, (1, 1, 1), draws_noise=False, dtype="float32")
    writer = ShardWriter(tmp_path, 0, layout)
    writer.append(np.full((1437, 1, 1, 1, 1), 38 / 127.5 - 1), {})
    writer.finish()
    write_index(tmp_path, layout, {}, np.zeros(1437), {})
    assert json.loads((tmp_path / "index.json").read_text())["raw_latents"]["std"] == [0]


def test_following_the_message_of_a_lost_shard_makes_it_again(cache, image_folder, tiny_vae):
    before = content(cache)
    (cache / "shard_00001.bin").unlink()
    with pytest.raises(UserError, match="is missing; remove it and index.json"):
        encoding.encode(job(cache, image_folder, tiny_vae), ALONE)  # not "complete already"
    (cache / "index.json").unlink()
    encoding.encode(job(cache, image_folder, tiny_vae), ALONE)
    assert content(cache) == before


def test_a_shard_made_again_keeps_nothing_of_the_lost_one(cache, image_folder, tiny_vae):
    (cache / "shard_00001.bin").unlink()
    ShardWriter(cache, 1, job(cache, image_folder, tiny_vae).layout)
    assert not (cache / "shard_00001.json").exists()


def test_a_cache_in_the_data_folder_is_refused(image_folder, tmp_path):
    for out in (image_folder, image_folder / "cache", tmp_path / "x" / ".." / "data" / "c"):
        with pytest.raises(UserError, match="lies in the data folder .* choose a place beside it"):
            encode_command.main(["--data.path", str(image_folder), "--out", str(out)])
    assert {path.name for path in image_folder.iterdir()} == {"cat", "dog"}


@pytest.mark.parametrize("name", ["labels.npy", "shard_00000.bin", "index.json", "shard_9.bad"])
def test_encode_refuses_a_folder_of_foreign_files(tmp_path, image_folder, tiny_vae, name):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds {name} but no latent cache .* another --out"):
        encoding.encode(job(tmp_path / "c", image_folder, tiny_vae), ALONE)
    assert (tmp_path / "c" / name).read_text() == "mine"
    assert [file.name for file in (tmp_path / "c").iterdir()] == [name]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("name", ["shard_00001.bin.partial", "labels.npy.partial"])
def test_encode_writes_through_no_link(cache, image_folder, tiny_vae, tmp_path, name, link):
    for file in ("index.json", "shard_00001.bin", "shard_00001.json", "labels.npy"):
        (cache / file).unlink()
    (tmp_path / "mine").write_text("mine")
    link(cache / name, tmp_path / "mine")
    if name == "labels.npy.partial" and link is Path.hardlink_to:
        encoding.encode(job(cache, image_folder, tiny_vae), ALONE)  # a temporary name
    else:
        with pytest.raises(UserError, match=f"{name}: it is a (hard )?link"):
            encoding.encode(job(cache, image_folder, tiny_vae), ALONE)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_cache_of_any_image_size_is_not_encoded_again(cache, tmp_path):
    with pytest.raises(UserError, match="is a latent cache already; give --data.path images"):
        encode_command.main(["--data.path", str(cache), "--out", str(tmp_path / "again")])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mirrors", None), ("mirrors", 3), ("mirrors", "2"), ("dtype", "object"), ("dtype", []),
        ("latent_shape", [4, 4]), ("moments_shape", [8, -4, -4]), ("image_size", "8"),
        ("class_names", "cat"), ("class_names", [1, 2]), ("codec", "sd-vae-ema"),
        ("raw_latents", {}), ("labels_sha256", None), ("count", 10**12), ("count", True),
        ("shards", {}), ("shards", [{}]), ("shards", []),
    ],
)  # fmt: skip
def test_an_edited_index_is_refused_with_the_entry(cache, key, value):
    index = json.loads((cache / "index.json").read_text()) | {key: value}
    if value is None:
        del index[key]
    (cache / "index.json").write_text(json.dumps(index))
    named = "count 24, unlike the sum" if (key, value) == ("shards", []) else key
    with pytest.raises(UserError, match=rf"index.json cannot be read: {named}.*encode again"):
        LatentCache(cache)


def edit(file: Path, **entries: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


RECORD = {"name": "sd-vae-ema", "identity": {"name": "x"}, "draws_noise": True, "origin": {}}


@pytest.mark.parametrize(
    "identity",
    [
        {}, {"name": 5}, {"name": "x", "scale": "y"}, {"name": "x", "scale": 0},
        {"name": "x", "shift": [None]}, {"name": "x", "scale": [1, 2]}, {"name": "x", "scale": []},
    ],
)  # fmt: skip
def test_a_codec_that_normalises_nothing_is_refused(cache, identity):
    edit(cache / "index.json", codec=RECORD | {"identity": identity})
    for use in (inspect_cache, lambda cache, _: open_codec(CodecConfig(), cache)):
        with pytest.raises(UserError, match="codec of the latent cache .*encode again"):
            use(LatentCache(cache), None)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"raw_latents": {"mean": ["x"] * 4, "std": [1.0] * 4}}, "raw_latents.mean.0"),
        ({"raw_latents": {"mean": [1.0] * 3, "std": [1.0] * 4}}, "raw_latents of other than 4"),
        ({"moments_shape": [4, 4, 4]}, "moments_shape .* does not fit latent_shape"),
        ({"codec": RECORD | {"draws_noise": 1}}, "codec.draws_noise"),
        ({"schema": "1"}, "has schema 1, this version reads 1"),
    ],
)
def test_entries_that_contradict_one_another_are_refused(cache, entries, named):
    edit(cache / "index.json", **entries)
    with pytest.raises(UserError, match=f"{named}.*encode again"):
        LatentCache(cache)


@pytest.mark.parametrize(
    "labels",
    [np.zeros(24), np.zeros((24, 1), np.int64), np.full(24, None), np.zeros(23, np.int64), b"x"],
    ids=["floats", "two-axes", "objects", "too-few", "garbage"],
)
def test_labels_of_another_type_are_refused(cache, labels):
    file = cache / "labels.npy"
    file.write_bytes(labels) if isinstance(labels, bytes) else np.save(file, labels)
    edit(cache / "index.json", labels_sha256=file_hash(file))
    with pytest.raises(UserError, match=r"labels.npy (was changed|cannot be read)"):
        LatentCache(cache)


def begun(cache: Path) -> Path:
    for name in ("index.json", "shard_00001.bin", "shard_00001.json"):
        (cache / name).unlink()
    return cache


FACTS = {"count": 10, "sha256": "", "bad": {}, "sum": [0] * 4, "sum_of_squares": [0] * 4}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("encoding.json", "{}"),
        ("encoding.json", "[" * 100_000),
        ("shard_00000.json", "{}"),
        ("shard_00000.json", json.dumps(FACTS | {"count": "x"})),
        ("shard_00000.json", json.dumps(FACTS | {"count": 9})),
        ("shard_00000.json", json.dumps(FACTS | {"sum": [0, 0]})),
        ("shard_00000.json", json.dumps(FACTS | {"bad": {"12": "of another shard"}})),
        ("shard_00000.bin", "x"),
        ("shard_00001.bad", '{"x": "y"}'),
        ("shard_00001.bad", '{"0": "of another shard"}'),
    ],
)  # fmt: skip
def test_a_begun_cache_that_was_changed_gets_no_index(cache, image_folder, tiny_vae, name, content):
    (begun(cache) / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} .*(encode|encoding) again"):
        encoding.encode(job(cache, image_folder, tiny_vae), ALONE)
    assert not (cache / "index.json").exists()


def test_a_partial_shard_longer_than_its_shard_is_made_again(cache, image_folder, tiny_vae):
    before = content(cache)
    (begun(cache) / "shard_00001.bin.partial").write_bytes(before["shard_00001.bin"] * 2)
    encoding.encode(job(cache, image_folder, tiny_vae), ALONE)
    assert content(cache) == before


def test_few_shards_are_open_at_a_time(cache, monkeypatch):
    everything = np.arange(24)
    moments, _ = LatentCache(cache).batch(everything, np.zeros(24, bool))
    monkeypatch.setattr("sit_vit5.data.latent_cache._most_maps", lambda: 2)
    few = LatentCache(cache)
    for index in (0, 10, 20, 10, 0, 20):
        assert (few.batch(everything[[index]], np.zeros(1, bool))[0][0] == moments[index]).all()
        assert len(few._maps) <= 2
    assert list(few._maps) == [0, 2]


def test_images_that_are_not_finite_are_named(cache):
    stored = np.memmap(cache / "shard_00001.bin", np.float32, "r+", shape=(10, 2, 8, 4, 4))
    stored[2, :, 0, 1, 1] = np.inf
    stored[7, :, 7, 0, 0] = 1e4  # a log-variance
    stored.flush()
    source = LatentCache(cache)
    codec = RecordedCodec.read(source.codec, channels=4)
    loader = StepLoader(source, BatchPlan(12), seed=0, horizontal_flip=True, posterior=codec)
    named = loader.not_finite(0) + loader.not_finite(1)
    assert sorted(named) == [f"{cache / 'shard_00001.bin'}, image {n}" for n in (2, 7)]


@pytest.mark.parametrize("file", ["../x/shard_00001.bin", "/etc/passwd", "shard_1.bin\n", 3])
def test_a_shard_outside_the_cache_is_refused(cache, file):
    index = json.loads((cache / "index.json").read_text())
    index["shards"][1]["file"] = file
    (cache / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index.json cannot be read: shards.1.file"):
        LatentCache(cache)


def test_labels_that_are_no_class_are_refused(cache):
    np.save(cache / "labels.npy", np.full(24, 2))
    index = json.loads((cache / "index.json").read_text())
    index["labels_sha256"] = file_hash(cache / "labels.npy")
    (cache / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="holds labels from 2 to 2 for 2 classes; encode again"):
        LatentCache(cache)


def test_a_shard_that_vanishes_in_training_is_named(cache):
    stored = LatentCache(cache)
    (cache / "shard_00001.bin").unlink()
    assert len(stored.batch(np.arange(10), np.zeros(10, bool))[0]) == 10
    with pytest.raises(UserError, match=r"shard_00001.bin is missing; remove"):
        stored.batch(np.array([15]), np.zeros(1, bool))
