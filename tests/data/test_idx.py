"""IDX files and Fashion-MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from builders import COUNT, LABELS, idx, pixels, png, write_idx

from sit_vit5.config import DataConfig
from sit_vit5.data import array_sources as idx_module
from sit_vit5.data import build_source
from sit_vit5.data.array_sources import FASHION_CLASSES, open_fashion_mnist, open_idx
from sit_vit5.utils.errors import UserError


def test_splits_of_idx_are_found_by_their_names(tmp_path):
    folder = Path(idx(tmp_path, 0).path)
    grey = pixels(1, channels=1, size=(28, 28))[..., 0]
    write_idx(folder / "t10k-images.idx3-ubyte", grey[:5])
    write_idx(folder / "t10k-labels.idx1-ubyte", np.array([9, 7, 7, 10, 9], np.uint8))
    test = open_idx(folder, 28, split="test")
    assert test.class_names == ("7", "9", "10") and test.labels.tolist() == [1, 0, 0, 2, 1]
    assert (test.load(3)[0][..., 0] == grey[3]).all()
    assert open_idx(folder / "t10k-images.idx3-ubyte", 28).identity == test.identity
    assert build_source(DataConfig(path=str(folder), split="test", image_size=32)).size == 32
    # A gzipped copy beside the file is the same data.
    write_idx(folder / "t10k-images.idx3-ubyte.gz", grey[:5])
    assert open_idx(folder, 28, split="test").identity == test.identity
    with pytest.raises(UserError, match="unknown data.split 'val'; nearest: "):
        open_idx(folder, 28, split="val")
    (folder / "train-images-idx3-ubyte.gz").rename(folder / "other-idx3-ubyte")
    with pytest.raises(UserError, match="holds 0 files of images of the split train.*other-idx3"):
        open_idx(folder, 28)


def test_broken_idx_files_are_named(tmp_path):
    folder = Path(idx(tmp_path, 0).path)
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte"
    whole = {file: file.read_bytes() for file in (images, labels)}
    header = bytes((0, 0, 8, 3))
    cases = [
        (images, whole[images][:-200], "train-images-idx3-ubyte.gz is cut short or damaged"),
        (images, gzip.compress(b"\0\0\x0d\3rest"), "begins with 00000d03, not 00000803"),
        (images, b"", "cannot be read: it is empty"),
        (images, header + bytes(3), r"holds 0 bytes, its header says \[0, 0, 0\]"),
        (images, header + struct.pack(">III", 2, 4, 4) + bytes(9), r"holds 9 bytes.*\[2, 4, 4\]"),
        (images, header + bytes(12), "holds no image"),
        (labels, whole[labels][:-1], r"train-labels-idx1-ubyte holds 11 bytes.*\[12\]"),
        (labels, bytes((0, 0, 8, 1, 0, 0, 0, 1, 7)), "holds 1 labels for 12 images"),
    ]
    for file, content, message in cases:
        file.write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            open_idx(folder, 28)
        assert str(file) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(whole[file])
    labels.unlink()
    with pytest.raises(UserError, match="has no labels train-labels-idx1-ubyte beside it"):
        open_idx(folder, 28)
    assert len(open_idx(folder, 28, unconditional=True)) == COUNT
    with pytest.raises(UserError, match="absent cannot be read: No such file"):
        open_idx(tmp_path / "absent", 28)


def test_fashion_mnist_has_names_and_is_found_where_debian_puts_it(tmp_path, monkeypatch):
    folder = Path(idx(tmp_path / "debian", 0).path)
    monkeypatch.setattr(idx_module, "FASHION_FOLDER", folder)
    source = open_fashion_mnist(None, 28)
    assert source.class_names == FASHION_CLASSES and source.load(1)[1] == 1
    assert source.identity["source"] == "fashion-mnist"
    labels = np.full(COUNT, 10, np.uint8)
    write_idx(folder / "train-labels-idx1-ubyte", labels)
    with pytest.raises(UserError, match=r"image 0 of .*label 10 is not in 0\.\.9"):
        open_fashion_mnist(None, 28)


def test_fashion_mnist_of_the_hub_is_that_of_the_files(tmp_path, monkeypatch):
    import datasets

    folder = Path(idx(tmp_path / "files", 0).path)
    grey = pixels(channels=1, size=(28, 28))[..., 0]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(FASHION_CLASSES))}
    )
    coded = [{"bytes": png(image), "path": None} for image in grey]
    hub = datasets.Dataset.from_dict({"image": coded, "label": LABELS}, features=features)
    asked = []

    def load_dataset(path: str, split: str):
        asked.append((path, split))
        return hub

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(idx_module, "FASHION_FOLDER", tmp_path / "absent")
    source = open_fashion_mnist(None, 28)
    assert asked == [("zalando-datasets/fashion_mnist", "train")]
    assert source.identity == open_fashion_mnist(str(folder), 28).identity
    assert (source.images[..., 0] == grey).all()

    def no_network(path: str, split: str):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(
        UserError, match=r"no network.*apt-get install dataset-fashion-mnist.*--data"
    ):
        open_fashion_mnist(None, 28)
