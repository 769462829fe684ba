"""Data sets of Hugging Face: saved, parquet, columns, bad rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from builders import COUNT, LABELS, huggingface, pixels, png, rows

from sit_vit5.config import DataConfig
from sit_vit5.data import build_source
from sit_vit5.data.huggingface import open_hugging_face
from sit_vit5.data.transforms import BadImage
from sit_vit5.utils.errors import UserError


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_parquet_files_and_folders_are_read(tmp_path, own_cache):
    saved = build_source(huggingface(tmp_path, 0))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows(split == "test").to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    for path in ("data", "data/train-00000-of-00001.parquet"):
        source = build_source(DataConfig(path=str(tmp_path / path), image_size=8))
        assert source.identity == saved.identity and source.class_names == ("cat", "dog")
        assert (source.load(3)[0] == saved.load(3)[0]).all()
    test = build_source(DataConfig(path=str(tmp_path / "data"), split="test", image_size=8))
    assert test.identity != saved.identity
    with pytest.raises(UserError, match="data cannot be loaded.*val"):
        open_hugging_face(str(tmp_path / "data"), 8, split="val")
    with pytest.raises(UserError, match="corresponds to no data"):
        open_hugging_face(str(tmp_path / "data"), 8, split="train[:0]")


def test_splits_of_a_saved_folder(tmp_path):
    import datasets

    datasets.DatasetDict(train=rows(), test=rows(1)).save_to_disk(tmp_path / "both")
    path = str(tmp_path / "both")
    first, second = (build_source(DataConfig(path=path, split=s)) for s in ("train", "test"))
    assert first.identity != second.identity
    with pytest.raises(UserError, match="has no split 'val', only train, test"):
        open_hugging_face(path, 8, split="val")


def test_columns_are_found_by_feature_or_named(tmp_path):
    import datasets

    both = rows().add_column("word", ["b", "a", "a"] * 4).add_column("score", [0.5] * COUNT)
    both = both.add_column("raw", [png(image) for image in pixels(1)])
    both.save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert open_hugging_face(path, 8).class_names == ("cat", "dog")
    words = build_source(
        DataConfig(path=path, image_size=8, label_column="word", image_column="raw")
    )
    assert words.class_names == ("a", "b") and words.labels.tolist() == [1, 0, 0] * 4
    assert (words.load(0)[0] != open_hugging_face(path, 8).load(0)[0]).any()
    listed = r"picture \(Image\), kind \(ClassLabel\), word \(Value\)"
    for options, message in (
        (dict(label_column="Word"), rf"no column 'Word', only {listed}.*--data.label-column"),
        (dict(image_column="x"), r"no column 'x'.*--data.image-column"),
        (dict(label_column="score"), "column score of .* are float64"),
        (dict(image_column="score"), "column score of .* holds no images"),
    ):
        with pytest.raises(UserError, match=message):
            open_hugging_face(path, 8, **options)
    features = datasets.Features({"number": datasets.Value("int64")})
    datasets.Dataset.from_dict({"number": [1]}, features=features).save_to_disk(tmp_path / "no")
    with pytest.raises(UserError, match=r"0 columns of the feature Image, among number \(Value\)"):
        open_hugging_face(str(tmp_path / "no"), 8)
    rows().remove_columns("kind").save_to_disk(tmp_path / "plain")
    with pytest.raises(UserError, match="of the feature ClassLabel.*--data.unconditional True"):
        open_hugging_face(str(tmp_path / "plain"), 8)
    assert len(open_hugging_face(str(tmp_path / "plain"), 8, unconditional=True)) == COUNT


def test_bad_rows_are_named(tmp_path):
    import datasets

    labels = np.where(LABELS == 1, -1, 0)
    rows(labels=labels).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"row 1 of .*saved, train: label -1 is not in 0\.\.1"):
        open_hugging_face(str(tmp_path / "saved"), 8)
    (tmp_path / "a.png").write_bytes(png(pixels()[0]))
    coded = [
        {"bytes": b"no image", "path": "x.png"},
        None,
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": coded}, features=features).save_to_disk(tmp_path / "bad")
    source = open_hugging_face(str(tmp_path / "bad"), 8, unconditional=True)
    with pytest.raises(BadImage, match="row 0 of .*bad, train: cannot be decoded"):
        source.load(0)
    with pytest.raises(BadImage, match="row 1 of .*the row is empty"):
        source.load(1)
    assert source.load(2)[0].shape == (8, 8, 3)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the library datasets: pip install datasets"):
        open_hugging_face("org/name", 8)


def test_what_the_hub_cannot_give_is_one_line(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise FileNotFoundError("no such\ndata set")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        UserError, match=r"org/name cannot be loaded \(FileNotFoundError: no such data"
    ):
        open_hugging_face("org/name", 8)


def test_lists_as_labels_are_refused(tmp_path):
    rows().add_column("tags", [[0], [0, 1]] * 6).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="column tags of .* holds lists; expected a label a row"):
        open_hugging_face(str(tmp_path / "saved"), 8, label_column="tags")


def test_a_broken_parquet_file_is_one_line(tmp_path, own_cache, caplog):
    (tmp_path / "a.parquet").write_bytes(b"x" * 99)
    with pytest.raises(UserError, match="a.parquet cannot be loaded"):
        open_hugging_face(str(tmp_path / "a.parquet"), 8)
    assert not caplog.records


@pytest.mark.parametrize("empty", [None, float("nan"), ""])
def test_an_empty_label_is_named_by_row_and_column(tmp_path, empty):
    import datasets

    kind = {None: datasets.ClassLabel(names=["a", "b"]), "": datasets.Value("string")}
    features = datasets.Features(
        {"image": datasets.Image(), "label": kind.get(empty, datasets.Value("float32"))}
    )
    good = "a" if empty == "" else 1
    coded = [{"bytes": png(image), "path": None} for image in pixels()]
    labels = [good] * 7 + [empty] + [good] * 4
    table = datasets.Dataset.from_dict({"image": coded, "label": labels}, features=features)
    table.save_to_disk(tmp_path)
    with pytest.raises(UserError, match="row 7 of column label of .* is empty; correct it, or"):
        open_hugging_face(str(tmp_path), 8, label_column="label")
