"""Image files and folders: what is refused, what is kept quiet."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import pytest
from builders import pixels, png
from PIL import Image

from sit_vit5.data.sources import ImageFolder
from sit_vit5.data.transforms import BadImage, read_rgb
from sit_vit5.utils.errors import UserError


def test_a_bomb_is_a_bad_image_and_not_decoded(tmp_path):
    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    size = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    content = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )
    (tmp_path / "bomb.png").write_bytes(content)
    with pytest.raises(
        BadImage, match="bomb.png: cannot be decoded.*400000000 pixels.*exceeds limit"
    ):
        read_rgb(tmp_path / "bomb.png")


def test_broken_exif_and_large_images_warn_of_nothing(tmp_path, recwarn, monkeypatch):
    image = Image.fromarray(pixels()[0])
    exif = b"Exif\0\0" + b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 0x011A, 5, 1, 10**6)
    image.save(tmp_path / "a.jpg", exif=exif)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # of the 320 that the image has
    assert read_rgb(tmp_path / "a.jpg").size == (16, 20)
    assert not [warning for warning in recwarn if "PIL" in warning.filename]
    with Image.open(tmp_path / "a.jpg") as plain:  # what is kept away
        plain.getexif()
    assert any("decompression bomb" in str(warning.message) for warning in recwarn)


def test_formats_that_start_other_programs_are_not_opened(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EOF\n")
    with pytest.raises(BadImage, match="cannot identify"):
        read_rgb(tmp_path / "a.png")


KINDS = ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "QOI", "TIFF", "WEBP"]


@pytest.mark.parametrize("extension", [".avif", ".jfif", ".JPE", ".jp2", ".j2k", ".pgm", ".qoi"])
def test_every_kind_that_pillow_reads_is_taken(extension, tmp_path):
    (tmp_path / "a").mkdir()
    mode = "L" if extension == ".pgm" else "RGB"
    kind = "JPEG" if extension in (".jfif", ".JPE") else None
    Image.new(mode, (16, 16), 200).save(tmp_path / "a" / f"a{extension}", kind)
    source = ImageFolder(tmp_path, 8)
    assert len(source) == 1 and not source.notes and source.load(0)[0].shape == (8, 8, 3)


def test_files_passed_over_are_counted_by_kind(image_folder):
    for name in ("cat/a.heic", "cat/b.heic", "dog/c.png~", "dog/x/README", "list.TXT", "dog/.a"):
        (image_folder / name).parent.mkdir(exist_ok=True)
        (image_folder / name).write_bytes(b"")
    note = "note: 5 files passed over: 2 .heic, 1 .txt, 1 .png~, 1 without extension"
    for unconditional in (False, True):
        (found,) = ImageFolder(image_folder, 8, unconditional=unconditional).notes
        assert sorted(found.split()) == sorted(note.split()) or found == note
    for file in (image_folder / "cat").glob("*.png"):
        file.unlink()
    with pytest.raises(UserError, match="cat holds no image .*; 2 files passed over: 2 .heic; rem"):
        ImageFolder(image_folder, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_known_by_its_content(kind, tmp_path):
    Image.fromarray(pixels()[0]).save(tmp_path / "a.png", kind)
    assert read_rgb(tmp_path / "a.png").size == (16, 20)


def test_a_stream_is_read_as_a_file_is(tmp_path):
    content = png(pixels()[0])
    (tmp_path / "a.png").write_bytes(content)
    assert read_rgb(io.BytesIO(content), "x") == read_rgb(tmp_path / "a.png")
    with pytest.raises(BadImage, match="row 3: cannot be decoded"):
        read_rgb(io.BytesIO(content[:40]), "row 3")


@pytest.mark.parametrize("parts", [("train",), ("train", "val"), ("images",)])
def test_a_root_one_level_too_high_is_refused(parts, tmp_path):
    for part in parts:
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "a.png")
    inner = tmp_path / parts[0]
    with pytest.raises(UserError, match=f"holds 2 sub-folders; did you mean --data.path {inner}?"):
        ImageFolder(tmp_path, 8)
    assert ImageFolder(inner, 8).class_names == ("cat", "dog")
    assert len(ImageFolder(tmp_path, 8, unconditional=True)) == 2 * len(parts)


@pytest.mark.parametrize("held_out", ["val", "Testing", "ILSVRC2012_img_val", "val2017"])
@pytest.mark.parametrize("more", [(), ("unlabeled",), ("annotations",)])
def test_a_flat_part_beside_train_is_no_class(tmp_path, held_out, more):
    """ImageNet's validation images come without sub-folders."""
    for name in ("train/cat", "train/dog", held_out, *more):
        (tmp_path / name).mkdir(parents=True)
        if name != "annotations":
            Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    with pytest.raises(UserError, match=f"did you mean --data.path {tmp_path / 'train'}"):
        ImageFolder(tmp_path, 8)


@pytest.mark.parametrize("names", [("train", "car/red"), ("train/2024", "bus"), ("train", "test")])
def test_classes_may_be_called_train(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    assert len(ImageFolder(tmp_path, 8).class_names) == 2


def test_a_run_folder_is_no_data(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "samples" / "step_1.png")
    (tmp_path / "config.yaml").write_text("")
    for unconditional in (False, True):
        with pytest.raises(UserError, match="is the folder of a training run"):
            ImageFolder(tmp_path, 8, unconditional=unconditional)


def test_images_may_lie_at_any_depth_below_their_class(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name / "2024").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "2024" / "a.png")
    assert ImageFolder(tmp_path, 8).class_names == ("cat", "dog")


def class_folders(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "a.png")
    return root


def test_hidden_images_beside_the_classes_are_ignored(tmp_path):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / "._a.png").write_bytes(b"")  # as macOS leaves them
    assert len(ImageFolder(tmp_path, 8)) == 2


def test_links_that_lead_back_to_each_other_are_refused(tmp_path):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "more").symlink_to(tmp_path / "dog")
    assert len(ImageFolder(tmp_path, 8)) == 3
    (tmp_path / "dog" / "more").symlink_to(tmp_path / "cat")  # was read 40 times over
    with pytest.raises(UserError, match="cat/more/more is a link to a folder it lies in; remove"):
        ImageFolder(tmp_path, 8)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    class_folders(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "locked").mkdir()
    scandir = os.scandir

    def locked(path):  # permissions do not stop the root user of a test machine
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(UserError, match=r"cat/locked cannot be read \(Permission denied\); mend"):
        ImageFolder(tmp_path, 8)


def test_a_pipe_is_a_bad_image_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(BadImage, match="a.png: cannot be decoded .it is a pipe"):
        read_rgb(tmp_path / "a.png")


def test_the_reason_of_a_bad_image_is_the_same_in_every_run():
    with pytest.raises(BadImage) as error:
        read_rgb(io.BytesIO(b"text"), "row 3")
    # Pillow's own names the stream by its address.
    assert str(error.value) == "row 3: cannot be decoded (cannot identify image file)"


def test_a_class_that_is_a_link_to_nothing_is_not_lost(image_folder):
    (image_folder / "bird").symlink_to("nowhere")
    with pytest.raises(UserError, match="bird is a link to nothing; correct or remove it"):
        ImageFolder(image_folder, 8)
