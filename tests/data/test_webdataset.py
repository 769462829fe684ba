"""WebDataset tars: samples, names, damage, what is unsafe."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

import pytest
from builders import pixels, png, webdataset, write_tar

from sit_vit5.data.transforms import BadImage
from sit_vit5.data.webdataset import TarShards
from sit_vit5.utils.errors import UserError

CAT = png(pixels()[0])
SAMPLE = {".png": CAT, ".cls": b"0"}


def test_tars_take_names_patterns_and_names_of_classes(tmp_path):
    first = {"n/b.jpg": CAT, "n/b.cls": b"7\n", "n/b.json": b"{}", "n/.x.jpg": b"", "._a.jpg": b""}
    write_tar(tmp_path / "train-0.tar", first)
    write_tar(tmp_path / "train-1.tar", {"a.input.png": CAT, "a.cls": b"11", "a.PNG": CAT})
    write_tar(tmp_path / "val-0.tar", {"README": b"", "v.cls": b"7", "v.png": CAT})
    source = TarShards(tmp_path / "train-*.tar", 8)
    assert source.class_names == ("7", "11") and source.labels.tolist() == [0, 1]
    assert source.describe(0) == f"n/b.jpg in {tmp_path / 'train-0.tar'}"
    assert len(TarShards(tmp_path, 8)) == 3 and len(TarShards(tmp_path / "val-0.tar", 8)) == 1
    (tmp_path / "classnames.txt").write_text("\n".join(f"name {i}" for i in range(12)) + "\n")
    named = TarShards(tmp_path, 8)
    assert named.labels.tolist() == [7, 11, 7] and named.class_names[11] == "name 11"
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match=r"n/b.jpg in .*train-0.tar: label 7 is not in 0\.\.1"):
        TarShards(tmp_path, 8)
    with pytest.raises(UserError, match="is no tar, folder of tars or pattern"):
        TarShards(tmp_path / "other-*.tar", 8)


def test_tar_samples_that_are_not_whole_are_named(tmp_path):
    file = tmp_path / "a.tar"
    cases = [
        ({"a.png": CAT}, "a.tar: a.png is no sample; expected one image and one .cls"),
        ({"a.cls": b"1", "b.png": CAT}, "a.cls is no sample"),
        ({"a.png": CAT, "b.png": CAT, "a.cls": b"1"}, "a.png is no sample.*tar --sort=name"),
        ({"a.png": CAT, "a.jpg": CAT, "a.cls": b"1"}, "a.png, a.jpg, a.cls is no sample"),
        ({"a.png": CAT, "a.cls": b"cat"}, r"a.cls holds b'cat'; expected a whole number"),
        ({"a.png": CAT, "a.cls": b"-1"}, r"a.cls holds b'-1'; expected a whole number"),
        ({"a.txt": b""}, "holds no image"),
        ({"../a.png": CAT}, r"unsafe name '\.\./a.png'"),
        ({"/etc/a.png": CAT}, "unsafe name '/etc/a.png'"),
        ({"": CAT}, "unsafe name ''"),
    ]
    for members, message in cases:
        write_tar(file, members)
        with pytest.raises(UserError, match=message):
            TarShards(file, 8)
    write_tar(file, {"a.png": CAT, "b.png": CAT})
    assert len(TarShards(file, 8, unconditional=True)) == 2


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(kind, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(UserError, match="a.tar: a.png is a link or another special file"):
        TarShards(tmp_path, 8)


def test_a_tar_cut_anywhere_is_named(tmp_path):
    members = {
        f"{i}.{kind}": CAT if kind == "png" else b"1" for i in range(3) for kind in ("cls", "png")
    }
    file = write_tar(tmp_path / "a.tar", members)
    content = file.read_bytes()
    end = TarShards(file, 8).index
    last = end.offsets[2] + end.sizes[2]
    for length in (0, 100, 512, 700, end.offsets[1] - 512, last - 5, -(-last // 512) * 512):
        file.write_bytes(content[:length])
        with pytest.raises(
            UserError, match="a.tar (is cut short, damaged|cannot be read: it is empty)"
        ):
            TarShards(file, 8)
    file.write_bytes(content[:1024] + b"x" * 512 + content[1536:])  # a header overwritten
    with pytest.raises(UserError, match="no header and no end at byte 1024"):
        TarShards(file, 8)
    file.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="damaged or compressed"):
        TarShards(file, 8)


def test_an_image_of_a_tar_that_cannot_be_decoded_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", {"x/a.png": CAT[:50], "x/a.cls": b"0"})
    source = TarShards(tmp_path, 8)
    with pytest.raises(BadImage, match=r"x/a.png in .*a.tar: cannot be decoded"):
        source.load(0)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(BadImage, match="No such file"):
        source.load(0)


@pytest.mark.parametrize("size", [-512, -1536, 2**80])
def test_a_member_of_impossible_size_ends_the_reading(size, tmp_path):
    info = tarfile.TarInfo("a.png")
    info.size = size
    header = info.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(header + bytes(2048))
    with pytest.raises(UserError, match="a.tar is cut short, damaged or compressed"):
        TarShards(tmp_path, 8)


@pytest.mark.parametrize(
    "pax",
    [
        {"GNU.sparse.map": "0,x"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
    ],
)
def test_a_sparse_member_without_its_map_is_named(pax, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.png")
        info.size, info.pax_headers = len(CAT), pax
        archive.addfile(info, io.BytesIO(CAT))
    with pytest.raises(UserError, match="a.tar is cut short, damaged or compressed"):
        TarShards(tmp_path, 8)


@pytest.mark.parametrize(
    ("kind", "size", "count"), [(b"L", -512, 1), (b"x", -512, 1), (b"x", 0, 3000)]
)
def test_broken_long_headers_of_a_tar_are_named(kind, size, count, tmp_path):
    info = tarfile.TarInfo("a")
    info.type, info.size = kind, size
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) * count + bytes(1024))
    with pytest.raises(UserError, match="a.tar is cut short, damaged or compressed"):
        TarShards(tmp_path, 8)


def test_pipes_folders_and_odd_patterns_are_no_tars(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    for path in (tmp_path, tmp_path / "x.tar", tmp_path / "*.tar"):
        with pytest.raises(UserError, match="x.tar cannot be read: it is a pipe"):
            TarShards(path, 8)
    (tmp_path / "x.tar").unlink()
    (tmp_path / "x.tar").mkdir()
    for name in ("x.tar", "**.tar", "***", "[", "no-*.tar", "\0"):
        with pytest.raises(UserError, match="is no tar, folder of tars or pattern"):
            TarShards(tmp_path / name, 8)
    (tmp_path / "y.tar").symlink_to("nowhere")
    with pytest.raises(
        UserError, match="y.tar cannot be read: No such file.*; fetch the tar or remove"
    ):
        TarShards(tmp_path, 8)


@pytest.mark.parametrize("coded", [b"caf\xe9\nb\n", "cat\ndog".encode("utf-16")])
def test_class_names_that_are_not_utf8_are_refused(tmp_path, coded):
    webdataset(tmp_path, 0)
    (tmp_path / "classes.txt").write_bytes(coded)
    with pytest.raises(UserError, match="classes.txt is not UTF-8 text; save it as UTF-8"):
        TarShards(tmp_path, 8)


def test_a_name_twice_in_one_tar_is_refused(tmp_path):
    """`tar --append` to correct a label leaves both."""
    first = {"./1.png": CAT, "./1.cls": b"0", "2.png": CAT, "2.cls": b"1"}
    tar = write_tar(tmp_path / "a.tar", first)
    with tarfile.open(tar, "a") as archive:
        for name, content in (("1.png", CAT), ("1.cls", b"1")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    for unconditional in (False, True):
        with pytest.raises(UserError, match="a.tar: 1.png is there twice .* write the tar again"):
            TarShards(tar, 8, unconditional=unconditional)
    (tmp_path / "more").mkdir()
    for name in ("b", "c"):  # the same names in other tars are other images
        write_tar(tmp_path / "more" / f"{name}.tar", {"1.png": CAT, "1.cls": b"0"})
    assert len(TarShards(tmp_path / "more", 8)) == 2


def test_dotted_names_show_what_the_kind_is(tmp_path):
    names = {f"v1.0/img.{n:04d}.png": CAT for n in range(3)}
    tar = write_tar(tmp_path / "a.tar", names)
    message = "3 files passed over: 3 .*.png, such as v1.0/img.0000.png: the kind of a member is"
    with pytest.raises(UserError, match=re.escape(message)):
        TarShards(tar, 8, unconditional=True)


def test_members_passed_over_are_counted(tmp_path):
    sample = {"1.png": CAT, "1.json": b"", "1.txt": b"", "1.seg.png": CAT, "1.cls": b"0"}
    tar = write_tar(tmp_path / "a.tar", sample | {"2.png": CAT, "2.json": b"", "2.cls": b"0"})
    for unconditional in (False, True):
        (note,) = TarShards(tar, 8, unconditional=unconditional).notes
        assert note == "note: 4 files passed over: 2 .json, 1 .txt, 1 .*.png"


@pytest.mark.parametrize("again", ["x/./1", "x//1", "./x/1"])
def test_the_same_name_in_other_words_is_refused(tmp_path, again):
    names = ["x/1", "2", again]
    members = {f"{name}{end}": content for name in names for end, content in SAMPLE.items()}
    with pytest.raises(UserError, match="1.png is there twice"):
        TarShards(write_tar(tmp_path / "a.tar", members), 8)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("none")])
def test_class_names_that_are_no_file_are_refused(tmp_path, make):
    webdataset(tmp_path, 0)
    make(tmp_path / "classes.txt")
    with pytest.raises(UserError, match="classes.txt cannot be read: .*; write one name per line"):
        TarShards(tmp_path, 8)
