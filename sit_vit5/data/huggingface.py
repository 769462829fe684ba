"""Data sets of Hugging Face's `datasets`: saved folders, parquet files, ids of the hub."""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from sit_vit5.data.fingerprints import short_hash, stamp_of
from sit_vit5.data.sources import ImageSource, hash_contents, number_classes
from sit_vit5.data.transforms import BadImage, read_rgb
from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.files import check_regular_file

if TYPE_CHECKING:
    import datasets


SAVED = ("state.json", "dataset_dict.json")  # of `save_to_disk`: a split, several splits


TABLES = (".parquet", ".arrow")


class HuggingFaceImages(ImageSource):
    """A column of images and one of labels. Images are RGB; rows are read from a memory map.

    Class names are those of the label's feature, else its values: numbers or texts.
    """

    def __init__(
        self, rows: datasets.Dataset, image: str, label: str | None, *, where: str, image_size: int
    ):
        """label None: without classes. where: names the data in messages."""
        import datasets

        self.column, self.where = image, where
        labels, class_names = np.zeros(len(rows), np.int64), ()
        if label is not None:
            labels, class_names = read_labels(rows, label, where)
        try:
            # Coded as they are: the project's own way from bytes to pixels decodes them.
            coded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        except Exception as error:  # pyarrow's types
            raise UserError(f"column {image} of {where} holds no images: {error}") from None
        self.rows = coded.with_format(None)
        lengths = _lengths(self.rows, image)
        super().__init__(
            "huggingface",
            labels=labels,
            class_names=class_names,
            channels=3,
            image_size=image_size,
            digest=_digest(lengths, labels),
            contents=hash_contents(map(self.coded, range(len(labels))), int(lengths.sum())),
        )

    def picture(self, index: int) -> Image.Image:
        coded = self.rows[index][self.column] or {}
        if coded.get("bytes") is not None:
            return read_rgb(io.BytesIO(coded["bytes"]), self.describe(index))
        if coded.get("path") is not None:
            return read_rgb(Path(coded["path"]), self.describe(index))
        raise BadImage(self.describe(index), "the row is empty")

    def coded(self, index: int) -> bytes:
        coded = self.rows[index][self.column] or {}
        if coded.get("bytes") is not None:
            return coded["bytes"]
        path = Path(coded.get("path") or "")
        return path.read_bytes() if path.is_file() else b""

    def stamp(self, index: int) -> int:
        tables = [stamp_of(Path(table["filename"])) for table in self.rows.cache_files]
        return short_hash(index, tables) if tables else 0  # in memory

    def describe(self, index: int) -> str:
        return f"row {index} of {self.where}"


def open_hugging_face(
    path: str,
    image_size: int,
    *,
    split: str = "train",
    image_column: str | None = None,
    label_column: str | None = None,
    unconditional: bool = False,
) -> HuggingFaceImages:
    """The split of a saved folder, of a parquet file or folder of them, or of a hub id.

    Columns that are not named are found by their features, Image and ClassLabel.
    """
    rows = load_rows(path, split)
    where = f"{path}, {split}"
    image = find_column(rows, image_column, "Image", option="image_column", where=where)
    label = None
    if not unconditional:
        label = find_column(rows, label_column, "ClassLabel", option="label_column", where=where)
    return HuggingFaceImages(rows, image, label, where=where, image_size=image_size)


def load_rows(path: str, split: str) -> datasets.Dataset:
    """The rows of a split."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.source huggingface needs the library datasets: pip install datasets"
        ) from None

    # What it logs of a failure it also raises.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    local = Path(path)
    files = [local] if local.exists() and not local.is_dir() else []
    for file in [*files, *(file for end in TABLES for file in local.rglob(f"*{end}"))]:
        check_regular_file(file, remedy="fetch it again")
    try:
        if any((local / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(path)
        elif local.is_dir():  # the files' names tell the splits
            return datasets.load_dataset("parquet", data_dir=path, split=split)
        elif local.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files={"train": path}, split=split)
        else:
            return datasets.load_dataset(path, split=split)
    except Exception as error:  # of the file system, the network, the hub, pyarrow
        raise UserError(
            f"{path} cannot be loaded ({type(error).__name__}: {brief(error)}); fetch it again"
        ) from None
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if split not in splits:
        raise UserError(
            f"{path} has no split {split!r}, only {', '.join(splits)}; use --data.split"
        )
    return splits[split]


def find_column(
    rows: datasets.Dataset, name: str | None, feature: str, *, option: str, where: str
) -> str:
    """The named column, or the only one of a feature."""
    there = {column: type(kind).__name__ for column, kind in rows.features.items()}
    listed = ", ".join(f"{column} ({kind})" for column, kind in there.items())
    flag = f"--data.{option.replace('_', '-')}"
    if name is not None:
        if name not in there:
            raise UserError(f"{where} has no column {name!r}, only {listed}; use {flag}")
        return name
    found = [column for column, kind in there.items() if kind == feature]
    if len(found) != 1:
        free = "" if feature == "Image" else ", or --data.unconditional True"
        raise UserError(
            f"{where} has {len(found)} columns of the feature {feature}, among {listed}; choose "
            f"one by {flag}{free}"
        )
    return found[0]


def read_labels(
    rows: datasets.Dataset, column: str, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) and class names."""
    try:
        values = np.array(rows.select_columns([column]).with_format(None)[:][column])
    except ValueError:  # lists of several lengths
        raise UserError(f"column {column} of {where} holds lists; expected a label a row") from None
    empty = np.array([value is None or value != value or value == "" for value in values.tolist()])
    if empty.any():
        raise UserError(
            f"row {empty.argmax()} of column {column} of {where} is empty; correct it, or train "
            "without classes (--data.unconditional True)"
        )
    names = getattr(rows.features[column], "names", None)
    if names is None or values.dtype.kind not in "iu":
        return number_classes(values, f"column {column} of {where}")
    return values, tuple(names)


def _lengths(rows: datasets.Dataset, column: str) -> np.ndarray:
    """Bytes of the coded images, (N,), -1 where there are none: of the images nothing is read."""
    import pyarrow.compute

    coded = rows.with_format("arrow")[:][column]
    lengths = pyarrow.compute.binary_length(pyarrow.compute.struct_field(coded, "bytes"))
    return lengths.fill_null(-1).to_numpy().astype(np.int64)


def _digest(lengths: np.ndarray, labels: np.ndarray) -> str:
    return hashlib.sha256(lengths.tobytes() + labels.tobytes()).hexdigest()
