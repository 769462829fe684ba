"""What every source of images keeps, and what a path means."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import BUILDERS, LABELS, idx, npz, pixels, webdataset
from helpers import TINY, run_here
from PIL import Image

from sit_vit5.config import DataConfig
from sit_vit5.data import READ_BY, SOURCES, build_source, detect
from sit_vit5.data.sources import ArrayImages, checked_names, number_classes
from sit_vit5.data.transforms import BadImage, center_crop
from sit_vit5.utils.errors import UserError


@pytest.fixture(params=sorted(BUILDERS))
def name(request) -> str:
    return request.param


def test_every_source_of_images_is_tested_here():
    assert BUILDERS.keys() == SOURCES.keys() - {"latents"}


def test_items_have_the_shape_and_labels_that_the_source_says(name, tmp_path):
    source = build_source(BUILDERS[name](tmp_path, 0))
    channels, height, width = source.item_shape
    assert source.kind == "images" and len(source) == source.identity["count"] >= 12
    assert (
        source.labels.dtype == np.int64 and source.labels.max() == len(source.class_names) - 1
    ) or (name == "fashion-mnist")
    for index in (0, 7, 11):
        image, label = source.load(index)
        assert (image.dtype, image.shape) == (np.uint8, (height, width, channels))
        assert label == source.labels[index]
        mirrored, same_label = source.load(index, mirror=True)
        assert (mirrored == image[:, ::-1]).all() and same_label == label
        assert isinstance(source.describe(index), str)
    assert len({source.describe(index) for index in range(12)}) == 12


def test_a_source_survives_the_way_to_another_process(name, tmp_path):
    source = build_source(BUILDERS[name](tmp_path, 0))
    first, _ = source.load(5)
    there = pickle.loads(pickle.dumps(source))
    assert (there.load(5)[0] == first).all() and there.describe(5) == source.describe(5)
    assert there.identity == source.identity and (there.labels == source.labels).all()


def test_the_identity_is_that_of_the_content(name, tmp_path):
    def identity(folder: str, seed: int) -> dict:
        (tmp_path / folder).mkdir()
        return build_source(BUILDERS[name](tmp_path / folder, seed)).identity

    first = identity("a", 0)
    assert identity("b", 0) == first
    other = identity("c", 1)
    assert other["sha256"] != first["sha256"]
    assert json.loads(json.dumps(first)) == first


def test_without_classes_all_labels_are_zero(name, tmp_path):
    source = build_source(replace(BUILDERS[name](tmp_path, 0), unconditional=True))
    assert source.class_names == () and not source.labels.any() and source.load(1)[1] == 0


def test_a_path_tells_its_source(name, tmp_path):
    config = BUILDERS[name](tmp_path, 0)
    if config.path is not None:
        assert detect(Path(config.path)) == name


def test_all_formats_give_the_same_pixels(tmp_path):
    expected = [center_crop(Image.fromarray(image), 8) for image in pixels()]
    for name in ("folder", "huggingface", "npz", "webdataset"):
        (tmp_path / name).mkdir()
        source = build_source(BUILDERS[name](tmp_path / name, 0))
        order = np.argsort(LABELS, kind="stable") if name == "folder" else np.arange(12)
        for index, original in enumerate(order):
            image, label = source.load(index)
            assert (image == expected[original]).all() and label == LABELS[original]


def test_single_files_tell_their_source_and_others_are_refused(tmp_path):
    assert detect(Path(idx(tmp_path, 0).path, "train-images-idx3-ubyte.gz")) == "idx"
    webdataset(tmp_path / "..", 0)
    assert detect(tmp_path / ".." / "train-0.tar") == "webdataset"
    assert detect(Path("shards/train-*.tar")) == "webdataset"
    assert detect(Path("data/train.parquet")) == "huggingface"
    (tmp_path / "data.zip").write_bytes(b"")
    with pytest.raises(UserError, match=r"data.zip is of no known kind; expected a folder or one"):
        detect(tmp_path / "data.zip")
    with pytest.raises(UserError, match="org/name does not exist.*--data.source huggingface"):
        build_source(DataConfig(path="org/name"))


def test_options_that_a_source_does_not_read_are_refused(tmp_path):
    config = npz(tmp_path, 0)
    for option in READ_BY:
        with pytest.raises(UserError, match=f"data.{option} x has no use with data.source npz"):
            build_source(replace(config, **{option: "x"}))


def array_source(labels: list[int], names: tuple[str, ...], images: np.ndarray) -> ArrayImages:
    return ArrayImages(
        "test", images, where="here", labels=np.array(labels), class_names=names, image_size=4,
        digest="",
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [10, 1000, -1])
def test_labels_out_of_range_are_refused_on_the_host(wrong):
    images, names = np.zeros((3, 4, 4, 1), np.uint8), tuple("0123456789")
    assert len(array_source([0, 9, 5], names, images)) == 3
    with pytest.raises(UserError, match=rf"image 1 of here: label {wrong} is not in 0\.\.9"):
        array_source([0, wrong, 5], names, images)


def test_class_names_are_printable_and_given_once():
    assert checked_names(["a", "b c"]) == ("a", "b c")
    for names, message in (
        (["a", "\x1b"], "not printable"),
        (["a", "b", "a"], "'a' is given twice"),
    ):
        with pytest.raises(UserError, match=message):
            checked_names(names)


def test_values_become_labels_in_the_order_of_numbers():
    labels, names = number_classes(np.array([100, 9, 10, 9]), "x")
    assert labels.tolist() == [2, 0, 1, 0] and names == ("9", "10", "100")
    labels, names = number_classes(np.array(["100", "9", "10"]), "x")
    assert labels.tolist() == [2, 0, 1] and names == ("9", "10", "100")
    labels, names = number_classes(np.array(["dog", "cat", "10"]), "x")
    assert labels.tolist() == [2, 1, 0] and names == ("10", "cat", "dog")
    with pytest.raises(UserError, match="x has the label -1; expected 0 or above"):
        number_classes(np.array([0, -1]), "x")
    with pytest.raises(UserError, match=r"labels of x are float64 \(2,\)"):
        number_classes(np.array([0.5, 1]), "x")


def test_labels_of_any_length_are_texts():
    names = ["9" * 5000, "10" * 5000]  # Python converts 4,300 digits
    assert number_classes(np.array(names), "x")[1] == tuple(sorted(names))


def test_a_line_of_pixels_is_a_bad_image_and_takes_no_memory():
    source = array_source([0], ("0",), np.zeros((1, 1, 20_000_000, 1), np.uint8))
    with pytest.raises(BadImage, match="20000000x1 is too narrow"):
        source.load(0)


def test_arrays_of_another_size_are_cropped_after_adm():
    images = pixels(channels=1)[:1]
    expected = center_crop(Image.fromarray(images[0, ..., 0]), 4)
    found, _ = array_source([0], ("0",), images).load(0)
    assert (found == expected[..., None]).all()


@pytest.mark.parametrize("name", ["idx", "webdataset"])
def test_two_steps_of_training_from_a_new_source(name, tmp_path):
    config = BUILDERS[name](tmp_path, 0)
    run_here(
        "train_sit.py", *TINY, "--output-dir", tmp_path / "runs", "--steps", 2, "--batch-size", 4,
        "--data.source", name, "--data.path", config.path, "--data.image-size", config.image_size,
    )  # fmt: skip
    state = json.loads(
        (tmp_path / "runs" / "tiny" / "checkpoints" / "step_0000002" / "state.json").read_text()
    )
    assert state["data"]["source"] == name and state["class_names"] == ["0", "1"]


def test_hidden_files_do_not_tell_the_source(tmp_path):
    (tmp_path / "cat").mkdir()
    for name in ("._train.tar", ".a.parquet"):
        (tmp_path / name).write_bytes(b"")
    assert detect(tmp_path) == "folder"


def test_the_digits_are_scikit_learns_whether_its_file_is_found_or_not(monkeypatch):
    from sklearn.datasets import load_digits

    from sit_vit5.data import array_sources as digits

    scans = load_digits()
    for found in (True, False):
        if not found:
            monkeypatch.setattr(digits.Path, "is_file", lambda path: False)
        images, labels = digits.read_scans()
        assert (images == scans.images).all() and (labels == scans.target).all()
        assert labels.dtype == scans.target.dtype  # part of the data's hash


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
LEFT_BEHIND = {
    "pointer of Git LFS, not the file; fetch it with git lfs pull": POINTER,
    "web page, not the file; download the file itself": b"<!DOCTYPE html>\n<html>",
}
PLACES = ["a.npz", "a.tar", "a.parquet", "train-images-idx3-ubyte", "cat/a.png"]


@pytest.mark.parametrize("reason", LEFT_BEHIND)
@pytest.mark.parametrize("place", PLACES)
def test_what_downloads_leave_behind_is_named(tmp_path, place, reason):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_bytes(LEFT_BEHIND[reason])
    path = tmp_path if "cat" in place else tmp_path / place
    with pytest.raises((UserError, BadImage), match=reason):
        build_source(DataConfig(path=str(path), image_size=8)).load(0)
