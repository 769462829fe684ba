"""npz archives as training data."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from builders import COUNT, LABELS, npz, pixels

from sit_vit5.data import build_source
from sit_vit5.data.array_sources import Npz
from sit_vit5.utils.errors import UserError


def test_npz_is_mapped_or_read_and_both_are_equal(tmp_path):
    plain = build_source(npz(tmp_path, 0))
    np.savez_compressed(tmp_path / "small.npz", arr_0=pixels(), arr_1=LABELS)
    packed = Npz(tmp_path / "small.npz", 8)
    assert isinstance(plain.images, np.memmap) and not isinstance(packed.images, np.memmap)
    assert all((plain.load(i)[0] == packed.load(i)[0]).all() for i in range(COUNT))
    assert plain.class_names == ("cat", "dog") and packed.class_names == ("0", "1")


def test_npz_of_greys_and_of_texts_as_labels(tmp_path):
    grey = pixels(channels=1)[..., 0]
    np.savez(tmp_path / "a.npz", images=np.asfortranarray(grey), labels=["b", "a"] * 6)
    source = Npz(tmp_path / "a.npz", 16)
    assert source.item_shape == (1, 16, 16) and source.class_names == ("a", "b")
    assert source.labels.tolist() == [1, 0] * 6
    assert (source.images[..., 0] == grey).all()


def test_broken_npz_files_are_named(tmp_path, monkeypatch):
    file, images = tmp_path / "a.npz", pixels()
    cases = [
        (dict(x=images), "a.npz holds x; expected images or arr_0"),
        (dict(images=images), "expected labels or arr_1, or train without classes"),
        (
            dict(images=images / 255, labels=LABELS),
            r"are float64 \(12, 20, 16, 3\); expected uint8",
        ),
        (dict(images=images[..., :2], labels=LABELS), r"are uint8 \(12, 20, 16, 2\)"),
        (dict(images=images[:0], labels=LABELS), "a.npz holds no image"),
        (dict(images=images, labels=LABELS[:5]), r"holds labels \(5,\) for 12 images"),
        (dict(images=images, labels=LABELS / 2), "labels of .*a.npz are float64"),
        (dict(images=images, labels=LABELS + 1, class_names=["a", "b"]), r"2 is not in 0\.\.1"),
        (dict(images=images, labels=LABELS / 2, class_names=["a", "b"]), "expected integers"),
        (dict(images=images, labels=np.array([None] * 12)), "labels of .*cannot be read.*object"),
    ]
    for arrays, message in cases:
        np.savez(file, **arrays)
        with pytest.raises(UserError, match=message):
            Npz(file, 8)
    np.savez_compressed(file, images=images, labels=LABELS)
    monkeypatch.setattr("sit_vit5.data.array_sources.MAX_IN_MEMORY", 100)
    with pytest.raises(
        UserError, match="images of .* takes .* KB of memory; save it with np.savez"
    ):
        Npz(file, 8)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(UserError, match="a.npz is not an npz file"):
        Npz(file, 8)


def test_an_array_shorter_than_its_header_says_is_not_read_beyond_its_end(tmp_path):
    stream = io.BytesIO()
    np.save(stream, pixels())
    labels = io.BytesIO()
    np.save(labels, LABELS)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", stream.getvalue()[:-1000])
        archive.writestr("labels.npy", labels.getvalue())
        archive.writestr("other.npy", bytes(2000))  # what would be taken for pixels
    with pytest.raises(UserError, match=r"images of .* cannot be read: it holds 10520 bytes, too"):
        Npz(tmp_path / "a.npz", 8)


def test_messages_on_damaged_npz_files_are_short(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, images=pixels(), labels=LABELS)
    content = bytearray(file.read_bytes())
    content[26:28] = b"\xff\xff"  # the length of the first name, in its local header
    file.write_bytes(content)
    with pytest.raises(UserError, match="images of .*; the file is damaged, write it again") as one:
        Npz(file, 8)
    np.savez(file, **{f"{number:03d}" + "x" * 1000: LABELS for number in range(500)})
    with pytest.raises(UserError, match=r"holds 000x+\.\.\., .* and 492 more; expected") as many:
        Npz(file, 8)
    assert max(len(str(error.value)) for error in (one, many)) < 1200


def test_no_message_advises_to_unpickle(tmp_path):
    header = b"{" + b" " * 200_000 + b"}"
    length = len(header).to_bytes(4, "little")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\2\0" + length + header)
    with pytest.raises(UserError, match="its header is too long") as error:
        Npz(tmp_path / "a.npz", 8)
    assert "pickle" not in str(error.value)


def test_class_names_of_bytes_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=pixels(), labels=LABELS, class_names=[b"cat", b"dog"])
    with pytest.raises(UserError, match=r"class names of .*a.npz are \|S3; expected texts"):
        Npz(tmp_path / "a.npz", 8)
