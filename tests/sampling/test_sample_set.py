"""The sample set on disk: filled by index, killed, continued, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sit_vit5.sampling.sample_set import SampleSet, write_pngs
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import lock

SETTINGS = {"seed": 0, "steps": 5}
SHAPE = (2, 3, 1)


def images(indices: range) -> np.ndarray:
    """None of them black: those are made again."""
    return np.stack([np.full(SHAPE, index + 1, np.uint8) for index in indices])


def opened(folder: Path, count: int = 10, settings: dict = SETTINGS) -> SampleSet:
    samples = SampleSet(folder, settings, count=count, shape=SHAPE)
    assert not samples.prepare()
    samples.open()
    return samples


def test_a_set_filled_in_any_order_over_two_sessions_is_packed_in_index_order(tmp_path):
    first = opened(tmp_path)
    first.write(range(5, 10), images(range(5, 10)), evaluations=7, passes=14)
    del first  # killed
    second = opened(tmp_path)
    assert second.missing(range(5)) and not second.missing(range(5, 10))
    with pytest.raises(UserError, match="5 of 10 images are missing"):
        second.finish([0] * 10, {})
    second.write(range(5), images(range(5)), evaluations=7, passes=14)
    archive = second.finish(list(range(10)), {"device": "cpu"})
    packed = np.load(archive)
    assert packed.files == ["arr_0"]
    assert (packed["arr_0"] == images(range(10))).all()
    manifest = json.loads((tmp_path / "samples.json").read_text())
    assert manifest["settings"] == SETTINGS and manifest["complete"]
    assert (manifest["evaluations_per_image"], manifest["network_passes_per_image"]) == (7, 14)
    assert manifest["labels"] == list(range(10)) and manifest["device"] == "cpu"
    assert {p.name for p in tmp_path.iterdir()} == {"samples.npz", "samples.json"}
    assert SampleSet(tmp_path, SETTINGS, count=10, shape=SHAPE).prepare()


def test_a_half_removed_partial_folder_never_yields_black_images(tmp_path):
    samples = opened(tmp_path)
    samples.write(range(10), images(range(10)), 1, 1)
    (tmp_path / "samples.partial" / "images.npy").unlink()
    again = opened(tmp_path)
    assert again.done() == 0 and again.missing(range(10))
    again.write(range(10), images(range(10)), 1, 1)
    again.finish([0] * 10, {})
    (tmp_path / "samples.partial").mkdir()  # a kill left it behind
    assert SampleSet(tmp_path, SETTINGS, count=10, shape=SHAPE).prepare()
    assert not (tmp_path / "samples.partial").exists()


def begun(folder: Path) -> Path:
    """A set whose images are all made but not packed; its folder of parts."""
    opened(folder).write(range(10), images(range(10)), 1, 1)
    return folder / "samples.partial"


@pytest.mark.parametrize("change", [-6, -1, 6])
def test_images_of_another_length_are_refused(tmp_path, change):
    file = begun(tmp_path) / "images.npy"
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(UserError, match="images.npy is damaged: .* bytes.*; remove .*partial and"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("images.npy", np.zeros((10, *SHAPE), np.float32)),
        ("images.npy", np.zeros((10, *SHAPE), np.int8)),
        ("images.npy", np.zeros((9, *SHAPE), np.uint8)),
        ("cost.npy", np.full((10, 2), "4")),
        ("cost.npy", np.full(10, 4, np.int32)),
        ("cost.npy", np.full((10, 1), 4, np.int32)),
        ("cost.npy", np.full((10, 2), 4.0)),
        ("cost.npy", np.asfortranarray(np.full((10, 2), 4, np.int32))),
    ],
)
def test_parts_of_another_type_or_shape_are_refused(tmp_path, name, array):
    np.save(begun(tmp_path) / name, array)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        opened(tmp_path)


def test_parts_behind_links_are_refused(tmp_path):
    file = begun(tmp_path) / "images.npy"
    file.rename(tmp_path / "elsewhere.npy")
    file.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(UserError, match="it is a link to another file"):
        opened(tmp_path)


def test_black_images_of_an_interrupted_copy_are_missing(tmp_path, capsys):
    file = begun(tmp_path) / "images.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-15] + bytes(15))  # two images and a half
    again = opened(tmp_path)
    assert "2 images" in capsys.readouterr().err
    assert [again.missing([n]) for n in range(10)] == [False] * 7 + [True] * 3


def test_a_damaged_archive_is_not_complete(tmp_path):
    archive = begun(tmp_path).with_name("samples.npz")
    opened(tmp_path).finish([0] * 10, {})
    content = archive.read_bytes()
    for damaged in (content[:100], content[:-300] + bytes(300), b""):
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match="samples.npz is damaged: .*; remove it and run"):
            SampleSet(tmp_path, SETTINGS, count=10, shape=SHAPE).prepare()
    archive.unlink()
    opened(tmp_path)  # as the message says


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"complete": 1, "settings": {}}', "{}"])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    begun(tmp_path)
    (tmp_path / "samples.json").write_text(text)
    with pytest.raises(UserError, match="samples.json cannot be read: .*; it is not a manifest"):
        opened(tmp_path)


def test_pngs_cut_by_a_copy_are_written_again(tmp_path):
    begun(tmp_path)
    opened(tmp_path).finish([0] * 10, {})
    write_pngs(tmp_path, range(10))
    files = sorted((tmp_path / "images").iterdir())
    whole = [file.read_bytes() for file in files]
    files[3].write_bytes(whole[3][:-5])
    files[5].unlink()
    write_pngs(tmp_path, range(10))
    assert [file.read_bytes() for file in files] == whole
    assert (np.asarray(Image.open(files[7])) == 8).all()


def test_a_disk_that_fills_while_packing_keeps_the_images(tmp_path, monkeypatch):
    samples = opened(tmp_path)
    samples.write(range(10), images(range(10)), 1, 1)

    def full(source, target, length):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sit_vit5.sampling.sample_set.shutil.copyfileobj", full)
        with pytest.raises(UserError, match="all images are kept"):
            samples.finish([0] * 10, {})
    assert not list(tmp_path.glob("*.npz*"))
    again = opened(tmp_path)
    assert again.done() == 10
    assert (np.load(again.finish([0] * 10, {}))["arr_0"] == images(range(10))).all()


def test_maps_are_backed_by_the_disk_from_the_start(tmp_path):
    samples = SampleSet(tmp_path, SETTINGS, count=1000, shape=(32, 32, 3))
    samples.prepare()
    stat = (tmp_path / "samples.partial" / "images.npy").stat()
    assert stat.st_blocks * 512 >= 1000 * 32 * 32 * 3


def test_a_first_try_without_an_image_does_not_bind_the_folder(tmp_path):
    opened(tmp_path)
    for count in (4, 20):
        other = opened(tmp_path, count=count, settings=SETTINGS | {"seed": count})
        assert other.images.shape == (count, *SHAPE)
    cost = tmp_path / "samples.partial" / "cost.npy"
    for broken in (b"", bytes(300)):
        cost.write_bytes(broken)
        with pytest.raises(UserError, match="cost.npy is damaged"):
            SampleSet(tmp_path, SETTINGS, count=20, shape=SHAPE).prepare()


def test_the_archive_is_the_same_file_for_the_same_images(tmp_path):
    archives = []
    for name in ("a", "b"):
        samples = opened(tmp_path / name)
        samples.write(range(10), images(range(10)), 1, 1)
        archives.append(samples.finish([0] * 10, {}).read_bytes())
    assert archives[0] == archives[1]


def test_other_settings_are_refused_before_and_after_completion(tmp_path):
    samples = opened(tmp_path)
    samples.write(range(2), images(range(2)), 1, 1)
    other = SampleSet(tmp_path, SETTINGS | {"seed": 1}, count=10, shape=SHAPE)
    with pytest.raises(UserError, match=r"other settings \(seed: 0 -> 1\)"):
        other.prepare()
    samples.write(range(10), images(range(10)), 1, 1)
    before = samples.finish([0] * 10, {}).read_bytes()
    with pytest.raises(UserError, match="other settings"):
        other.prepare()
    assert (tmp_path / "samples.npz").read_bytes() == before


def test_foreign_files_are_not_touched(tmp_path):
    np.savez(tmp_path / "samples.npz", np.zeros(3))
    with pytest.raises(UserError, match="exists without a manifest"):
        SampleSet(tmp_path, SETTINGS, count=10, shape=SHAPE).prepare()
    (tmp_path / "samples.json").write_text("[]")
    with pytest.raises(UserError, match="not a manifest"):
        SampleSet(tmp_path, SETTINGS, count=10, shape=SHAPE).prepare()


def test_a_set_larger_than_the_disk_is_refused_before_it_is_begun(tmp_path):
    with pytest.raises(UserError, match="images need 24.6 PB, .* free; choose another --out"):
        SampleSet(tmp_path / "x", SETTINGS, count=10**12, shape=(64, 64, 3)).prepare()
    assert not (tmp_path / "x").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    with lock(tmp_path, "sampling run"):
        with pytest.raises(UserError, match="in use by another sampling run"):
            with lock(tmp_path, "sampling run"):
                pass
    with lock(tmp_path, "sampling run"):
        pass
