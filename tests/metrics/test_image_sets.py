"""Sets of images: any container gives the same pixels, by batches, parts and numbers."""

from __future__ import annotations

import io
import os
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.evaluation.inputs import hash_of, open_image_set, read_manifest
from sit_vit5.metrics.image_sets import UnmadeSet, array_set, npz_set, with_channels
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 4, 5, 3), dtype=np.uint8)


def png(image: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, **{"format": "png", **options})
    return stream.getvalue()


def save_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def save_folder(path: Path) -> None:
    for number, image in enumerate(PIXELS):
        folder = path / ("a" if number < 10 else "b")  # nested
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}.PNG").write_bytes(png(image))


def save_sample_set(path: Path) -> None:
    path.mkdir()
    np.savez(path / "samples.npz", PIXELS)
    (path / "images").mkdir()
    (path / "images" / "000000.png").write_bytes(png(PIXELS[0]))


CONTAINERS = {
    "a.npz": lambda path: np.savez(path, PIXELS, labels=np.arange(23)),
    "packed.npz": lambda path: np.savez_compressed(path, arr_0=PIXELS),
    "a.npy": lambda path: np.save(path, PIXELS),
    "folder": save_folder,
    "samples": save_sample_set,
    "a.ZIP": lambda path: save_zip(
        path,
        {
            **{f"./in/{n:02d}.png": png(image) for n, image in enumerate(PIXELS)},
            "__MACOSX/in/00.png": b"",
            "in/.hidden.png": b"",
            "in/readme.txt": b"",
        },
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_images_in_batches_parts_and_by_number(tmp_path, name):
    CONTAINERS[name](tmp_path / name)
    found = open_image_set(str(tmp_path / name))
    assert (found.count, found.shape) == (23, (4, 5, 3))  # 4 high, 5 wide
    batches = list(found.batches(10))
    assert [len(batch) for batch in batches] == [10, 10, 3]
    assert (np.concatenate(batches) == PIXELS).all()
    assert (np.concatenate(list(found.batches(4, 7, 18))) == PIXELS[7:18]).all()
    assert not list(found.batches(4, 23)) and not list(found.batches(4, 5, 5))
    numbers = [22, 0, 3, 3, 1]
    assert (found.images(numbers) == PIXELS[numbers]).all()
    assert found.images([]).shape == (0, 4, 5, 3)


def test_a_folder_of_samples_stands_for_its_archive_and_manifest(tmp_path):
    save_sample_set(tmp_path / "set")
    archive = tmp_path / "set" / "samples.npz"
    assert hash_of(str(tmp_path / "set")) == hash_of(str(archive)) == file_hash(archive)
    (tmp_path / "set" / "samples.json").write_text('{"class_names": ["a"], "labels": [0]}')
    manifest = read_manifest(str(tmp_path / "set"), file_hash(archive))
    assert manifest.labels == [0]


def test_a_set_of_one_image_works(tmp_path):
    np.savez(tmp_path / "a.npz", PIXELS[:1])
    for found in (npz_set(tmp_path / "a.npz"), array_set("one", PIXELS[:1])):
        (batch,) = found.batches(64)
        assert (batch == PIXELS[:1]).all()


def test_files_tell_their_true_format_and_their_folders(tmp_path):
    save_folder(tmp_path)
    (tmp_path / "a" / "00.PNG").write_bytes(png(PIXELS[0], format="jpeg"))
    found = open_image_set(str(tmp_path))
    assert found.formats == {"PNG": 22, "JPEG": 1} and found.folders == 2
    assert array_set("array", PIXELS).formats == {}


def test_large_archives_are_read_without_holding_them(tmp_path):
    count = 400
    images = np.zeros((count, 64, 64, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(count) % 256
    np.savez(tmp_path / "a.npz", images)
    found = npz_set(tmp_path / "a.npz")
    batches = found.batches(50)
    tracemalloc.start()
    total = sum(int(batch[:, 0, 0, 0].astype(int).sum()) for batch in batches)
    (_, peak) = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == (np.arange(count) % 256).sum()
    assert peak < images.nbytes / 2  # 4.9 MB of images, 0.6 MB a batch


@pytest.mark.parametrize(
    "array, message",
    [
        (PIXELS / 127.5 - 1, r"found float64 .*save floor.*first 23 images lie in \[-1, 1\]"),
        (
            np.where(np.arange(23) == 5, np.nan, 1.0)[:, None, None, None],
            "1 are not finite, such",
        ),
        (PIXELS.astype(np.int8), r"found int8 .*as uint8"),
        (PIXELS.transpose(0, 3, 1, 2), r"channels come last: save images.transpose\(0, 2, 3, 1\)"),
        (PIXELS.astype(np.int64), "found int64 .*; save grey levels 0 to 255 as uint8"),
        (np.zeros((2, 4, 4, 4), np.uint8), r"drop alpha: save images\[..., :3\]"),
        (
            np.zeros((0, 4, 4, 3), np.float32),
            r"expected uint8 images .* found float32 \(0, 4, 4, 3\)",
        ),
        (PIXELS[..., 0], "last axis"),
        (np.array([{"code": 1}], dtype=object), "pickled Python objects"),
        (np.float32(3), "expected uint8 images"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_that_are_no_images_are_refused_with_what_to_do(tmp_path, suffix, array, message):
    path = tmp_path / f"a{suffix}"
    (np.savez if suffix == ".npz" else np.save)(path, array)
    with pytest.raises(UserError, match=message) as error:
        open_image_set(str(path))
    assert "\n" not in str(error.value)


def test_files_that_are_all_grey_have_one_channel(tmp_path):
    greys = PIXELS[..., :1]
    for number, image in enumerate(greys):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{number:02d}.png")
    Image.fromarray(greys[3, ..., 0]).convert("LA").save(tmp_path / "03.png")
    Image.fromarray(greys[4, ..., 0].astype(np.uint16) * 257).save(tmp_path / "04.png")
    found = open_image_set(str(tmp_path))
    assert found.shape == (4, 5, 1) and (found.images(range(23)) == greys).all()
    Image.fromarray(PIXELS[9]).save(tmp_path / "09.png")
    found = open_image_set(str(tmp_path))
    assert found.shape == (4, 5, 3)
    assert (found.images([8, 9]) == np.stack([np.repeat(greys[8], 3, -1), PIXELS[9]])).all()


def test_grey_images_in_three_channels_are_grey():
    grey = np.repeat(PIXELS[..., :1], 3, -1)
    assert array_set("a", grey).is_grey() and array_set("a", grey[..., :1]).is_grey()
    assert not array_set("a", PIXELS).is_grey()
    assert not UnmadeSet("a", (4, 5, 3)).is_grey() and UnmadeSet("a", (4, 5, 1)).is_grey()
    assert (with_channels(grey, 1, name="a") == grey[..., :1]).all()
    assert (with_channels(grey[..., :1], 3, name="a") == grey).all()
    with pytest.raises(UserError, match="a: an image is in colour; .* are grey"):
        with_channels(PIXELS, 1, name="a")


def test_files_that_are_no_images_are_counted_by_kind(tmp_path):
    save_folder(tmp_path / "folder")
    names = ("a/notes.txt", "a/old.png~", "a/README", "b.heic", "metrics.json", "report.html")
    for name in names:
        (tmp_path / "folder" / name).write_text("")
    found = open_image_set(str(tmp_path / "folder"))
    assert found.passed_over == {".txt": 1, ".png~": 1, "without extension": 1, ".heic": 1}
    entries = {
        "0.png": png(PIXELS[0]),
        "a.txt": b"",
        "./.": b"",
        "d/": b"",
        "..": b"",
        "b.HEIC": b"",
    }
    save_zip(tmp_path / "a.zip", entries)
    found = open_image_set(str(tmp_path / "a.zip"))
    assert found.count == 1 and found.passed_over == {".txt": 1, ".heic": 1}


def damaged_zip(path: Path) -> None:
    save_zip(path, {f"{n}.png": png(image) for n, image in enumerate(PIXELS)})
    content = bytearray(path.read_bytes())
    content[40:60] = bytes(20)
    path.write_bytes(content)


def twice_in_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for image in PIXELS[:2]:
            archive.writestr("0.png", png(image))


def in_folder(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                (path / name).mkdir()
            else:
                (path / name).write_bytes(png(PIXELS[0]))

    return make


WRONG = {
    "cut.zip": (lambda p: p.write_bytes(b"PK\x03\x04 and no more"), "cut.zip is not a zip archive"),
    "bits.zip": (damaged_zip, r"0.png in .*bits.zip cannot be read"),
    "text.zip": (lambda p: save_zip(p, {"a.txt": b"", "b.txt": b"", "c.npy": b""}), "2 .txt, 1 .n"),
    "none.zip": (lambda p: save_zip(p, {}), "it is empty"),
    "dots.zip": (lambda p: save_zip(p, {"./.": b"x"}), "it is empty"),
    "twice.zip": (twice_in_zip, "twice.zip holds 0.png twice; write the archive again"),
    "mixed.zip": (
        lambda p: save_zip(p, {"a.png": png(PIXELS[0]), "b.png": png(PIXELS[0][:3])}),
        "b.png in .* is 5x3, the others 5x4",
    ),
    "broken.zip": (lambda p: save_zip(p, {"a.png": b"no picture"}), "a.png in .*cannot be decoded"),
    "stats.pkl": (lambda p: p.write_bytes(b"x"), "is a pickle, which may run foreign code"),
    "one.png": (lambda p: p.write_bytes(png(PIXELS[0])), "is a single image; give the folder"),
    "arrays": (
        lambda p: (p.mkdir(), np.save(p / "a.npy", PIXELS)),
        "arrays holds no image .looked for .png, .*1 file passed over: 1 .npy",
    ),
    "begun": (lambda p: (p / "samples.partial").mkdir(parents=True), "not complete; run the comm"),
    "pipe.npz": (os.mkfifo, "pipe.npz cannot be read: it is a pipe"),
    "lfs.npz": (
        lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "lfs.npz cannot be read: it is a pointer of Git LFS",
    ),
    "run": (
        in_folder("checkpoints/", "config.yaml", "samples/grid.png"),
        "run is a run folder, no set of images; make samples by sample/generate.py --checkpoint",
    ),
    "log": (in_folder("metrics.jsonl", "loss.png"), "log is a run folder, no set of images; make"),
    "step": (in_folder("state.json", "a.safetensors", "a.png"), "step is a checkpoint, no set of"),
    "cache": (in_folder("index.json", "shard_0.bin", "a.png"), "is a latent cache, .*made from"),
    "begun cache": (in_folder("encoding.json", "a.png"), "cache is a latent cache, .*made from"),
    "model": (in_folder("model_index.json", "a.png"), "model is an exported model"),
    "sweep": (in_folder("sweep.json", "sweep.png"), "sweep is a sweep, .*in its cells"),
    "short.npy": (lambda p: p.write_bytes(_npy()[:-5]), "cannot be read: it holds 1375 bytes"),
    "keys.npz": (lambda p: np.savez(p, images=PIXELS), "holds images; expected arr_0, uint8"),
}


def _npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, PIXELS)
    return stream.getvalue()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_set_of_images_is_refused_in_one_line(tmp_path, name):
    make, message = WRONG[name]
    make(tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        open_image_set(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_the_samples_of_a_run_are_no_set_of_images(tmp_path):
    in_folder("run/checkpoints/", "run/samples/grid.png")(tmp_path)
    samples = tmp_path / "run" / "samples"
    with pytest.raises(UserError, match="figures and sample sets of a run; make samples by"):
        open_image_set(str(samples))
    save_sample_set(samples / "step_0000001_23")
    with pytest.raises(UserError, match="of a run; give one of step_0000001_23 in it"):
        open_image_set(str(samples))
    assert open_image_set(str(samples / "step_0000001_23")).count == 23


def test_flipped_bits_are_noticed_where_the_whole_archive_is_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, PIXELS)
    content = bytearray(path.read_bytes())
    content[600] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match="arr_0 of .*cannot be read: Bad CRC-32"):
        list(open_image_set(str(path)).batches(10))
