"""What people have: npz archives, folders of images, built-in sets, manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5.data.digits import Digits
from sit_vit5.data.images import EXTENSIONS, BadImage, read_rgb
from sit_vit5.errors import UserError
from sit_vit5.evaluation.image_files import FolderSet, ZipSet
from sit_vit5.files import file_hash
from sit_vit5.metrics.image_sets import ImageSet, array_set, npy_set, npz_set
from sit_vit5.run_folder import ARCHIVE, PARTIAL

BUILT_IN = {"digits:train": "train", "digits:held-out": "held-out", "digits": "held-out"}


@dataclass(frozen=True)
class Manifest:
    """What the sampler wrote beside its archive. facts: the JSON, the others parts of it."""

    facts: dict
    labels: list[int]
    class_names: list[str]


def open_image_set(text: str) -> ImageSet:
    """What a person has as images: see `docs/evaluation.md`; or a UserError that says what to do.

    An npz with arr_0, an .npy, a folder that `sample/generate.py` wrote, a folder or zip archive of
    image files of one size, or a built-in set.
    """
    if text in BUILT_IN:
        return array_set(text, Digits(BUILT_IN[text]).images)
    path = archive_of(text)
    if text and path.is_dir():
        return FolderSet(path)
    if path.is_file():
        return FILES.get(path.suffix.lower(), npz_set)(path)
    raise UserError(
        f"{text!r} does not exist; give an npz, a folder of images, or one of {', '.join(BUILT_IN)}"
    )


def archive_of(text: str) -> Path:
    """The path; of a folder that `sample/generate.py` wrote the archive in it."""
    path = Path(text)
    if text and (path / ARCHIVE).is_file():
        return path / ARCHIVE
    if text and (path / PARTIAL).is_dir():
        raise UserError(
            f"{path} holds samples that are not complete; run the command that made them again"
        )
    return path


def _pickle(path: Path) -> ImageSet:
    raise UserError(
        f"{path} is a pickle, which may run foreign code when read; save its images as arr_0 of an "
        "npz, its statistics as mu and sigma"
    )


def _single(path: Path) -> ImageSet:
    raise UserError(f"{path} is a single image; give the folder of all images")


FILES: dict[str, Callable[[Path], ImageSet]] = {
    ".npy": npy_set,
    ".zip": ZipSet,
    ".pkl": _pickle,
    ".pickle": _pickle,
    **dict.fromkeys(EXTENSIONS, _single),
}


def check_same_size(other: ImageSet, samples: ImageSet, *, what: str = "a reference") -> None:
    """Refuses to compare images of different size or channels. what: the others should be."""
    if other.shape != samples.shape:
        raise UserError(
            f"{other.name} has images of {other.shape}, the samples {samples.shape} (height, "
            f"width, channels); give {what} of the samples' size"
        )


def hash_of(text: str) -> str | None:
    """SHA-256 of a file that was compared; None for folders and built-in sets."""
    path = Path(text) if text in BUILT_IN else archive_of(text)
    return file_hash(path) if path.is_file() else None


def read_manifest(samples: str, samples_hash: str | None) -> Manifest | None:
    """The manifest beside an archive (samples.json for samples.npz), or None if there is none.

    Refuses one that was written for another archive or holds other than a sampler's manifest.
    """
    if samples_hash is None:
        return None
    path = manifest_path(samples)
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_nan)
        sampler = facts.get("settings", {}).get("sampler", {})
        if not isinstance(sampler, dict):
            raise ValueError("settings.sampler is not a group of settings")
        labels, names = list(facts.get("labels", [])), list(facts["class_names"])
        manifest = Manifest(facts, labels, names)
        if any(type(label) is not int or label < 0 for label in manifest.labels):
            raise ValueError("labels are not numbers")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a manifest of samples ({error}); move it away") from None
    if facts.get("samples_sha256", samples_hash) != samples_hash:
        raise UserError(f"{path} was written for another {samples}: the hashes differ")
    return manifest


def _no_nan(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def manifest_path(samples: str) -> Path:
    """Where the manifest of an archive lies."""
    return archive_of(samples).with_suffix(".json")


def read_pixels(file: Path) -> np.ndarray:
    """An image file as uint8 (H, W, 3)."""
    try:
        return np.asarray(read_rgb(file))
    except BadImage as error:
        raise UserError(str(error)) from None
