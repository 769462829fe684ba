"""Files to pixels: modes, broken files, the crop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.config import DataConfig
from sit_vit5.data import build_source
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.sources import ImageFolder, list_images
from sit_vit5.data.transforms import BadImage, center_crop, read_rgb
from sit_vit5.utils.errors import UserError


def save(path: Path, mode: str, **options) -> Path:
    image = Image.new("RGB", (4, 3), (200, 100, 50))
    image.convert(mode).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.jpg", "CMYK"), ("a.png", "L"), ("a.png", "P"), ("a.png", "RGBA"), ("a.png", "1")],
)
def test_every_mode_becomes_rgb_of_the_same_size(tmp_path, name, mode):
    image = read_rgb(save(tmp_path / name, mode))
    assert (image.mode, image.size) == ("RGB", (4, 3))


def test_cmyk_keeps_its_colours(tmp_path):
    pixels = np.asarray(read_rgb(save(tmp_path / "a.jpg", "CMYK", quality=100)))
    assert np.abs(pixels.astype(int) - (200, 100, 50)).max() < 6


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path):
    grey = np.array([[0, 257, 32896, 65535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.asarray(read_rgb(tmp_path / "a.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_exif_orientation_is_not_applied_as_in_adm(tmp_path):
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by 90 degrees
    image.save(tmp_path / "a.jpg", exif=exif)
    assert read_rgb(tmp_path / "a.jpg").size == (4, 2)


def test_truncated_and_foreign_files_are_bad_images_with_their_name(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    data = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("cut.jpg", "text.png", "empty.png"):
        with pytest.raises(BadImage, match=f"{name}: cannot be decoded"):
            read_rgb(tmp_path / name)


def test_crop_of_a_rectangle_is_centred_on_both_axes():
    for width, height in ((30, 10), (10, 30)):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[(height - 10) // 2 : (height + 10) // 2, (width - 10) // 2 : (width + 10) // 2] = 255
        assert (center_crop(Image.fromarray(pixels), 10) == 255).all()


def test_folder_lists_classes_and_ignores_what_is_hidden(image_folder):
    (image_folder / ".ipynb_checkpoints").mkdir()
    (image_folder / "cat" / ".hidden.png").write_bytes(b"")
    (image_folder / "cat" / "notes.txt").write_text("")
    (image_folder / "cat" / "00.png").rename(image_folder / "cat" / "00.PNG")
    source = ImageFolder(image_folder, 8)
    assert source.class_names == ("cat", "dog") and len(source) == 24
    item, label = source.load(23)
    assert item.shape == (8, 8, 3) and label == 1
    mirrored, _ = source.load(23, mirror=True)
    assert (mirrored == item[:, ::-1]).all()


def test_names_that_are_not_utf8_do_not_matter_for_files(image_folder):
    odd = image_folder / "cat" / b"caf\xe9.png".decode("utf-8", "surrogateescape")
    (image_folder / "cat" / "00.png").rename(odd)
    source = ImageFolder(image_folder, 8)
    assert len(source) == 24 and source.load(11)[0].shape == (8, 8, 3)
    odd.write_bytes(b"")
    with pytest.raises(BadImage) as error:
        source.load(11)
    assert str(error.value).encode("utf-8") and r"caf\xe9.png" in str(error.value)
    (image_folder / "dog").rename(image_folder / b"d\xe9g".decode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match="not printable text"):
        ImageFolder(image_folder, 8)


def test_numeric_class_names_are_sorted_as_numbers(tmp_path):
    for name in ("10", "9", "100"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (2, 2)).save(tmp_path / name / "a.png")
    assert ImageFolder(tmp_path, 2).class_names == ("9", "10", "100")


def test_folder_mistakes_are_named(tmp_path, image_folder):
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "absent": "does not exist",
        image_folder / "cat" / "00.png": "no folder",
        tmp_path / "empty": "nothing lies directly in data folder .*empty, and 0 class sub-folders",
        image_folder / "cat": r"12 images such as \d\d.png lie directly .* 0 class sub-folders",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            ImageFolder(path, 8)
    (image_folder / "cat" / "loop").symlink_to(image_folder)
    with pytest.raises(UserError, match="loop is a link to a folder it lies in"):
        ImageFolder(image_folder, 8)
    (image_folder / "cat" / "loop").unlink()
    (image_folder / "loose.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"1 images such as loose.png.* 2 class sub-folders"):
        ImageFolder(image_folder, 8)
    (image_folder / "loose.png").unlink()
    (image_folder / "bird").mkdir()
    with pytest.raises(UserError, match="bird holds no image"):
        ImageFolder(image_folder, 8)


def test_unconditional_folder_needs_no_classes(image_folder):
    source = ImageFolder(image_folder / "cat", 8, unconditional=True)
    assert source.class_names == () and len(source) == 12
    assert len(list_images(image_folder)) == 24


def test_no_data_and_unknown_data_say_what_to_do():
    with pytest.raises(UserError, match=r"--data.path PATH.*configs/digits.yaml"):
        build_source(DataConfig())
    with pytest.raises(UserError, match="unknown data.source 'digit'; nearest: digits"):
        build_source(DataConfig(source="digit"))
    with pytest.raises(UserError, match="needs --data.path"):
        build_source(DataConfig(source="folder"))
    with pytest.raises(UserError, match="data.path has no use"):
        build_source(DataConfig(source="digits", path="x", image_size=8))
    with pytest.raises(UserError, match="image_size 16 does not fit digits"):
        build_source(DataConfig(source="digits", image_size=16))


def test_digits_are_split_without_overlap_and_keep_all_grey_levels():
    train, held_out = Digits("train"), Digits("held-out")
    assert (len(train), len(held_out)) == (1437, 360)
    assert train.class_names == tuple("0123456789")
    assert set(np.unique(train.images)) == {round(level * 255 / 16) for level in range(17)}
    assert min(np.bincount(held_out.labels)) > 20
    assert train.identity != held_out.identity
    with pytest.raises(UserError, match="no split"):
        Digits("test")
