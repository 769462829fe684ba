"""JSON is checked against a type where it is read; writers leave alone what is not theirs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from annotated_types import Ge
from PIL import Image

from sit_vit5.utils.arrays import allocate_npy, find_npy, members, write_npz
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import (
    check_output,
    lock,
    read_json,
    remove_own,
    replacing,
    save_image,
    write_json,
    write_text,
)


@dataclass(frozen=True)
class Facts:
    step: Annotated[int, Ge(0)]
    size: tuple[int, int]
    names: tuple[str, ...] = ()
    scale: float | None = None


def read(tmp_path: Path, text: str | bytes) -> Facts:
    path = tmp_path / "facts.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_json(path, Facts, remedy="make it again")


def test_read_json_gives_the_dataclass(tmp_path):
    facts = read(tmp_path, '{"step": 3, "size": [4, 5], "names": ["a"], "scale": 1, "new": 0}')
    assert facts == Facts(3, (4, 5), ("a",), 1.0)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[" * 100_000, "recursion"),
        ("", "Expecting value"),
        (b"\xff\xfe", "not UTF-8"),
        ("[]", "dictionary|object"),
        ('{"size": [1, 2]}', "step: Field required"),
        ('{"step": 1.0, "size": [1, 2]}', "step: .*integer"),
        ('{"step": "1", "size": [1, 2]}', "step: .*integer"),
        ('{"step": -1, "size": [1, 2]}', "step: .*greater than or equal to 0"),
        ('{"step": 1, "size": [1, "x"]}', "size.1: .*integer"),
        ('{"step": 1, "size": [1, 2], "scale": NaN}', "NaN is not a JSON number"),
        ('{"step": 1, "size": [1, 2], "names": ["\\ud800"]}', "hex escape|surrogate"),
    ],
)
def test_read_json_refuses_damage_in_one_line(tmp_path, text, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        read(tmp_path, text)
    assert str(refusal.value).endswith("; make it again")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_read_json_names_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "absent.json")


WRITERS = {
    "text": lambda path: write_text(path, "new"),
    "json": lambda path: write_json(path, {}),
    "image": lambda path: save_image(path, Image.new("L", (2, 2))),
    "npz": lambda path: write_npz(path, {"a": np.zeros(3)}),
    "npy": lambda path: allocate_npy(path, np.uint8, (3,)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_writers_never_write_through_links(tmp_path, write):
    mine, path = tmp_path / "mine", tmp_path / "out.png"
    partial = tmp_path / "out.png.partial"
    mine.write_text("mine")
    partial.symlink_to(mine)
    with pytest.raises(UserError, match=r"out.png.partial: it is a link to another file; remove"):
        write(path)
    assert partial.is_symlink() and not path.exists()
    partial.unlink()
    partial.hardlink_to(mine)  # a temporary name, so it is dropped
    path.symlink_to(mine)
    write(path)
    assert not path.is_symlink() and path.stat().st_size and not partial.exists()
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["out.png", "out.png.partial"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_writers_refuse_pipes_and_folders(tmp_path, name, make):
    make(tmp_path / name)
    for write in WRITERS.values():
        with pytest.raises(UserError, match=f"{name}: it is a (pipe|folder)"):
            write(tmp_path / "out.png")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_replacing_keeps_the_old_file_on_an_error(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("path", ["/dev/null", "/dev"])
def test_check_output_refuses_devices_and_folders(path):
    with pytest.raises(UserError, match=f"cannot write {path}: it is a"):
        check_output(Path(path))


def test_names_that_are_not_utf8_are_written_escaped(tmp_path):
    name = os.fsdecode(b"\xc3\xbc\xff.png")
    write_json(tmp_path / "a.json", {"name": name, "face": "\U0001f600"})
    assert read_json(tmp_path / "a.json") == {"name": "\xfc\\udcff.png", "face": "\U0001f600"}
    write_text(tmp_path / "a.txt", name)
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "\xfc\\udcff.png"


@pytest.mark.parametrize("read", [read_json, members, find_npy])
def test_readers_do_not_wait_for_pipes(tmp_path, read):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UserError, match="a cannot be read: it is a pipe"):
        read(tmp_path / "a")


def test_remove_own_keeps_foreign_files(tmp_path):
    folder, link = tmp_path / "parts", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    for name in ("00000.npz", "kept.npy", "mine.txt"):
        (folder / name).write_text("")
    remove_own(link, ["*"])
    assert len(list(folder.iterdir())) == 3
    remove_own(folder, ["*.npz", "kept.npy"])
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]
    remove_own(folder, ["mine.txt"])
    assert not folder.exists()


def test_lock_empties_no_file(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".lock").symlink_to("mine")
    for words in ("it is a link", "is not a lock of ours"):
        with pytest.raises(UserError, match=words), lock(tmp_path, "run"):
            pass
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("mine")
    assert (tmp_path / "mine").read_text() == (tmp_path / ".lock").read_text() == "mine"
