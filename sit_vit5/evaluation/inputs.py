"""What people have: npz archives, folders of images, built-in sets, manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt

from sit_vit5.data.digits import Digits
from sit_vit5.data.images import EXTENSIONS, BadImage, read_rgb
from sit_vit5.errors import UserError, listed
from sit_vit5.evaluation.image_files import FolderSet, ZipSet
from sit_vit5.files import check_regular_file, file_hash, read_json
from sit_vit5.metrics.image_sets import ImageSet, array_set, npy_set, npz_set
from sit_vit5.run_folder import (
    ARCHIVE,
    CHECKPOINTS,
    METRICS_FILE,
    PARTIAL,
    SAMPLES,
    STATE_FILE,
)

SAMPLE_IT = "make samples by sample/generate.py --checkpoint {path} and give their folder"
BUILT_IN = {"digits:train": "train", "digits:held-out": "held-out", "digits": "held-out"}


@dataclass(frozen=True)
class Manifest:
    """What the sampler wrote beside its archive. facts: the JSON, the others parts of it."""

    facts: dict
    labels: list[int]
    class_names: list[str]


@dataclass(frozen=True)
class ManifestSettings:
    """The settings of a manifest that the evaluation reads or shows."""

    sampler: dict = field(default_factory=dict)
    codec: dict | None = None
    model: str | None = None
    step: Annotated[int, Ge(0)] | None = None
    weights: str | None = None
    weights_sha256: str | None = None
    labels: str | None = None
    num_samples: Annotated[int, Ge(0)] | None = None
    indices: list[Annotated[int, Ge(0)]] | None = None


@dataclass(frozen=True)
class ManifestFile:
    """The types of a manifest; another sampler than ours may leave all out but the class names."""

    class_names: list[str]
    labels: list[Annotated[int, Ge(0), Lt(2**63)]] = field(default_factory=list)
    complete: bool = True
    samples_sha256: str | None = None
    settings: ManifestSettings | None = None
    command: str | None = None
    checkpoint: str | None = None
    device: str | None = None
    versions: dict | None = None
    evaluations_per_image: Annotated[int, Ge(0)] | None = None
    network_passes_per_image: Annotated[int, Ge(0)] | None = None


def open_image_set(text: str) -> ImageSet:
    """What a person has as images: see `docs/evaluation.md`; or a UserError that says what to do.

    An npz with arr_0, an .npy, a folder that `sample/generate.py` wrote, a folder or zip archive of
    image files of one size, or a built-in set.
    """
    if text in BUILT_IN:
        return array_set(text, Digits(BUILT_IN[text]).images)
    path = archive_of(text)
    if text and path.is_dir():
        check_images_folder(path)
        return FolderSet(path)
    if path.exists():
        check_regular_file(path, remedy="write it again")
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


# Files that a folder of ours holds, what it is, and what to do.
_OURS = (
    ((STATE_FILE, "*.safetensors"), "a checkpoint", SAMPLE_IT),
    ((CHECKPOINTS, "config.yaml"), "a run folder", SAMPLE_IT),
    ((METRICS_FILE,), "a run folder", SAMPLE_IT),
    (("model_index.json",), "an exported model", "give a folder of images that it has made"),
    (("classifier.json",), "a classifier", "give images"),
    (("index.json", "shard_*"), "a latent cache", "give the images that it was made from"),
    (("encoding.json",), "a latent cache", "give the images that it was made from"),
    (("sweep.json",), "a sweep", "give one of the folders in its cells"),
)


def check_images_folder(path: Path) -> None:
    """Refuses folders of ours that hold no set of images: their figures would be taken for one."""
    for names, what, remedy in _OURS:
        if all(any(path.glob(name)) for name in names):
            raise UserError(f"{path} is {what}, no set of images; {remedy.format(path=path)}")
    if path.name == SAMPLES and (path.parent / CHECKPOINTS).is_dir():
        sets = sorted(folder.name for folder in path.iterdir() if (folder / ARCHIVE).is_file())
        found = f"give one of {listed(sets)} in it" if sets else SAMPLE_IT.format(path=path.parent)
        raise UserError(f"{path} holds the figures and sample sets of a run; {found}")


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
    """Refuses to compare images of different size. what: the others should be.

    The numbers of channels may differ: see `common_channels`.
    """
    if other.shape[:2] != samples.shape[:2]:
        raise UserError(
            f"{other.name} has images of {other.shape[:2]}, the samples {samples.shape[:2]} "
            f"(height, width); give {what} of the samples' size"
        )


def common_channels(samples: ImageSet, other: ImageSet) -> int:
    """Channels in which to compare two sets: one grey channel equals three equal ones.

    Where only one set has three, they are looked at: 1 if all of its images are grey, else 3.
    """
    if samples.shape[2] == other.shape[2]:
        return samples.shape[2]
    wide = samples if samples.shape[2] == 3 else other
    return 1 if wide.is_grey() else 3


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
    if not path.exists():
        return None
    remedy = "it is not a manifest of samples: move it away"
    checked = read_json(path, ManifestFile, remedy=remedy)
    if checked.samples_sha256 not in (None, samples_hash):
        raise UserError(f"{path} was written for another {samples}: the hashes differ")
    return Manifest(read_json(path, remedy=remedy), checked.labels, checked.class_names)


def manifest_path(samples: str) -> Path:
    """Where the manifest of an archive lies."""
    return archive_of(samples).with_suffix(".json")


def read_pixels(file: Path) -> np.ndarray:
    """An image file as uint8 (H, W, 3)."""
    try:
        return np.asarray(read_rgb(file))
    except BadImage as error:
        raise UserError(str(error)) from None
