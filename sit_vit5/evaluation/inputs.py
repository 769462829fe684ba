"""What people have: npz archives, folders of images, built-in sets, manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sit_vit5.data.digits import Digits
from sit_vit5.data.folder import list_images
from sit_vit5.data.images import EXTENSIONS, BadImage, read_rgb
from sit_vit5.errors import UserError
from sit_vit5.files import file_hash
from sit_vit5.metrics.image_sets import ImageSet, array_set, check_images, npz_set

BUILT_IN = {"digits:train": "train", "digits:held-out": "held-out", "digits": "held-out"}
LOSSY = (".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Manifest:
    """What the sampler wrote beside its archive. facts: the JSON, the others parts of it."""

    facts: dict
    labels: list[int]
    class_names: list[str]


def open_image_set(text: str) -> ImageSet:
    """An npz with arr_0, a folder of images of one size, or a built-in set."""
    if text in BUILT_IN:
        return array_set(text, Digits(BUILT_IN[text]).images)
    path = Path(text)
    if text and path.is_dir():
        return folder_set(path)
    if path.is_file():
        return npz_set(path)
    raise UserError(
        f"{text!r} does not exist; give an npz, a folder of images, or one of {', '.join(BUILT_IN)}"
    )


def folder_set(folder: Path) -> ImageSet:
    """All images below a folder in order of their names; one size, as stored, never resized."""
    files = list_images(folder)
    if not files:
        raise UserError(f"{folder} holds no image (looked for {', '.join(EXTENSIONS)} below it)")
    shape = read_pixels(files[0]).shape

    def batches(size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(files), size):
            images = [read_pixels(file) for file in files[start : start + size]]
            for file, image in zip(files[start : start + size], images, strict=True):
                if image.shape != shape:
                    raise UserError(
                        f"{file} is {image.shape[1]}x{image.shape[0]}, the others "
                        f"{shape[1]}x{shape[0]}; all images must have one size"
                    )
            yield np.stack(images)

    check_images(str(folder), (len(files), *shape), np.dtype(np.uint8))
    return ImageSet(str(folder), len(files), shape, batches)


def lossy_note(images: ImageSet) -> list[str]:
    """A note if a folder holds JPEGs: they shift a distance to lossless images (row E8)."""
    folder = Path(images.name)
    if images.name in BUILT_IN or not folder.is_dir():
        return []
    lossy = [file for file in list_images(folder) if file.suffix.lower() in LOSSY]
    if not lossy:
        return []
    return [
        f"{folder} holds {len(lossy)} lossy files such as {lossy[0].name}: they shift distances"
    ]


def check_same_size(other: ImageSet, samples: ImageSet) -> None:
    """Refuses to compare images of different size or channels."""
    if other.shape != samples.shape:
        raise UserError(
            f"{other.name} has images of {other.shape}, the samples {samples.shape} (height, "
            "width, channels); give a reference of the samples' size"
        )


def hash_of(text: str) -> str | None:
    """SHA-256 of a file that was compared; None for folders and built-in sets."""
    path = Path(text)
    return file_hash(path) if text not in BUILT_IN and path.is_file() else None


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
    return Path(samples).with_suffix(".json")


def read_pixels(file: Path) -> np.ndarray:
    """An image file as uint8 (H, W, 3)."""
    try:
        return np.asarray(read_rgb(file))
    except BadImage as error:
        raise UserError(str(error)) from None
