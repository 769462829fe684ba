"""Images that changed under the same names: encoding, training and inspect tell."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders import LABELS, pixels, write_tar
from PIL import Image

from sit_vit5.commands import encode as encode_command
from sit_vit5.commands.inspect import main as inspect
from sit_vit5.config import DataConfig
from sit_vit5.data import build_source, same_data
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.utils.errors import UserError

CHANGED = 3  # this image


def bmp(image: np.ndarray) -> bytes:
    """So coded, images of one size have one length."""
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "BMP")
    return stream.getvalue()


def images(changed: bool) -> list[bytes]:
    coded = [bmp(image) for image in pixels()]
    if changed:
        coded[CHANGED] = bmp(255 - pixels()[CHANGED])
    return coded


def folder(root: Path, coded: list[bytes]) -> Path:
    for number, content in enumerate(coded):
        file = root / "data" / ("cat", "dog")[LABELS[number]] / f"{number:02d}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        os.utime(file, (1, 1))
    return root / "data"


def tar(root: Path, coded: list[bytes]) -> Path:
    members = {}
    for number, content in enumerate(coded):
        members |= {f"{number:02d}.bmp": content, f"{number:02d}.cls": b"%d" % LABELS[number]}
    return write_tar(root / "set.tar", members)


def saved(root: Path, coded: list[bytes]) -> Path:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    columns = {"image": [{"bytes": content, "path": None} for content in coded], "label": LABELS}
    shutil.rmtree(root / "saved", ignore_errors=True)
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(root / "saved")
    return root / "saved"


WRITE = {"folder": folder, "webdataset": tar, "huggingface": saved}


@pytest.fixture(params=WRITE)
def write(request):
    return WRITE[request.param]


def encoded(root: Path, data: Path, *options: str) -> Path:
    settings = {
        "--data.path": data, "--data.image-size": 8, "--data.workers": 0, "--batch-size": 2,
        "--shard-size": 5, "--codec.name": "identity", "--out": root / "c",
    }  # fmt: skip
    encode_command.main([*(str(word) for pair in settings.items() for word in pair), *options])
    return root / "c"


def verify(cache: Path) -> None:
    inspect(["--data.path", str(cache), "--verify", "True", "--out", f"{cache}.png"])


def test_a_changed_image_is_named_and_its_shard_encoded_again(tmp_path, write, capsys):
    data = write(tmp_path, images(False))
    cache = encoded(tmp_path, data)
    before, _ = LatentCache(cache).batch(np.arange(12), np.zeros(12, bool))
    times = [file.stat().st_mtime_ns for file in sorted(cache.glob("*.bin"))]
    write(tmp_path, images(True))
    for command in (encoded, lambda *_: verify(cache)):
        with pytest.raises(UserError, match="1 of 12 files changed since .* --changed encode"):
            command(tmp_path, data)
    encoded(tmp_path, data, "--changed", "encode")
    after, _ = LatentCache(cache).batch(np.arange(12), np.zeros(12, bool))
    (place,) = np.flatnonzero((before != after).any(axis=(1, 2, 3)))
    assert np.allclose(after[place], -before[place], atol=0.02)  # to the crop's rounding
    again = [file.stat().st_mtime_ns for file in sorted(cache.glob("*.bin"))]
    assert [number for number in range(3) if again[number] != times[number]] == [place // 5]
    capsys.readouterr()
    encoded(tmp_path, data)
    assert "complete already" in capsys.readouterr().out


def test_a_begun_cache_keeps_nothing_of_changed_images(tmp_path, write):
    data = write(tmp_path, images(False))
    cache = encoded(tmp_path, data)
    for name in ("index.json", "shard_00001.json"):
        (cache / name).unlink()
    write(tmp_path, images(True))
    with pytest.raises(UserError, match="1 of 12 files changed since they were encoded"):
        encoded(tmp_path, data)
    assert not (cache / "index.json").exists()


def test_a_copy_with_new_times_is_the_same_data(tmp_path, write, capsys):
    data = write(tmp_path, images(False))
    cache = encoded(tmp_path, data)
    copy = tmp_path / "copy" / data.name
    copy.parent.mkdir()
    shutil.copytree(data, copy) if data.is_dir() else shutil.copyfile(data, copy)
    capsys.readouterr()
    encoded(tmp_path, copy)
    verify(cache)
    said = capsys.readouterr().out
    assert "complete already" in said and "12 images are those that were encoded" in said
    shutil.rmtree(data) if data.is_dir() else data.unlink()
    verify(cache)
    assert "is not on this machine; it is not compared" in capsys.readouterr().out


def test_identities_tell_changed_contents(tmp_path, write):
    def identity(changed: bool) -> dict:
        return build_source(DataConfig(path=str(write(tmp_path, images(changed))))).identity

    before, after = identity(False), identity(True)
    assert before["sha256"] == after["sha256"] and not same_data(before, after)
    older = {key: value for key, value in before.items() if key != "contents"}
    assert same_data(older, before) and same_data(before, before)
    assert json.loads(json.dumps(before)) == before


def test_many_images_are_not_read_at_the_start(tmp_path, write, monkeypatch):
    def identity(write) -> dict:
        return build_source(DataConfig(path=str(write(tmp_path, images(False))))).identity

    monkeypatch.setattr("sit_vit5.data.sources.CHEAP_BYTES", 1000)
    assert "contents" not in identity(write)
    monkeypatch.setattr("sit_vit5.data.sources.CHEAP_FILES", 11)
    assert "contents" not in identity(folder)


def test_a_cache_without_fingerprints_compares_names(tmp_path, capsys):
    data = folder(tmp_path, images(False))
    cache = encoded(tmp_path, data)
    for file in cache.glob("*.sources"):  # of an older version
        file.unlink()
    for name in ("encoding.json", "index.json"):
        facts = json.loads((cache / name).read_text())
        del facts["data"]["contents"], facts["images"]
        (cache / name).write_text(json.dumps(facts))
    encoded(tmp_path, data)
    assert "complete already" in capsys.readouterr().out
    verify(cache)
    assert "which images were encoded is not recorded" in capsys.readouterr().out
    (data / "cat" / "00.bmp").rename(data / "cat" / "0.bmp")
    with pytest.raises(UserError, match="other settings .data.sha256"):
        encoded(tmp_path, data)
