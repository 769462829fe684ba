"""Image sets to evaluate, their manifests, and the versions and device for the record."""

from __future__ import annotations

import importlib.metadata
import io
import platform
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Lt

from sit_vit5 import __version__
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.sources import scan
from sit_vit5.data.transforms import (
    EXTENSIONS,
    BadImage,
    describe_passed_over,
    is_image_name,
    kinds_passed_over,
    read_header,
    read_rgb,
)
from sit_vit5.metrics.image_sets import ImageSet, array_set, npy_set, npz_set, with_channels
from sit_vit5.metrics.metric import default_device
from sit_vit5.utils.errors import UserError, brief, listed
from sit_vit5.utils.files import check_regular_file, file_hash, read_json
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import (
    ARCHIVE,
    CHECKPOINTS,
    METRICS_FILE,
    PARTIAL,
    SAMPLES,
    STATE_FILE,
)

# Libraries on whose versions a value can depend.
LIBRARIES = ("numpy", "scipy", "torch", "torch-fidelity", "timm", "pillow")


def versions() -> dict[str, str]:
    """Versions of Python, this project and the libraries that a value can depend on."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"sit_vit5": __version__, "python": platform.python_version(), **found}


def device_name() -> str:
    """Name of the device that computes the features."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


Value = TypeVar("Value")
OWN_FILES = ("metrics.json", "report.html")  # of an earlier evaluation of a folder
MOST_BYTES = 2**30  # of an image in an archive


class FileSet(ImageSet):
    """Images of one size, as stored, never resized, in the order of their names.

    Three channels, or one where all files are grey. The sizes of all files are compared before the
    first one is decoded.
    """

    def __init__(self, name: str, files: Sequence[Path | PurePosixPath], passed_over: Counter[str]):
        self.files = files
        sizes, formats, grey = [], Counter(), True
        with progress_bar(len(files), unit="file", title=f"sizes in {name}") as bar:
            for number in range(len(files)):
                header = self._call(read_header, number)
                sizes.append((header.width, header.height))
                formats[header.format] += 1
                grey = grey and header.grey
                bar.update()
        width, height = self._one_size(sizes)
        folders = len({file.parent for file in files})
        shape = (height, width, 1 if grey else 3)
        super().__init__(
            name, len(files), shape, formats=formats, passed_over=passed_over, folders=folders
        )

    @abstractmethod
    def _stream(self, number: int) -> Path | BinaryIO:
        """Path or stream for Pillow to open."""

    @abstractmethod
    def _called(self, number: int) -> str:
        """Name of the image in messages."""

    def images(self, indices: Sequence[int]) -> np.ndarray:
        found = np.empty((len(indices), *self.shape), np.uint8)
        for place, number in enumerate(indices):
            pixels = np.asarray(self._call(read_rgb, number))
            found[place] = with_channels(pixels, self.shape[2], name=self._called(number))
        return found

    def _call(self, read: Callable[[Path | BinaryIO, str], Value], number: int) -> Value:
        """`read` of a file; a file that cannot be decoded becomes one line."""
        try:
            return read(self._stream(number), self._called(number))
        except BadImage as error:
            raise UserError(f"{error}; write the file again or remove it") from None

    def _one_size(self, sizes: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the common size; an error names the first file that differs from most."""
        ((width, height), _), *others = Counter(sizes).most_common()
        if others:
            odd = next(n for n, size in enumerate(sizes) if size != (width, height))
            raise UserError(
                f"{self._called(odd)} is {sizes[odd][0]}x{sizes[odd][1]}, the others "
                f"{width}x{height}; all images must have one size, and real ones are "
                "cropped to one by evaluate/reference.py make"
            )
        return width, height


class FolderSet(FileSet):
    """All images below a folder."""

    def __init__(self, folder: Path):
        found = scan(folder)
        if not found.files:
            raise _no_image(folder, found.passed_over)
        own = Counter(Path(name).suffix for name in OWN_FILES if (folder / name).is_file())
        super().__init__(str(folder), found.files, found.passed_over - own)

    def _stream(self, number: int) -> Path:
        return self.files[number]

    def _called(self, number: int) -> str:
        return str(self.files[number])


class ZipSet(FileSet):
    """All images in a zip archive."""

    def __init__(self, path: Path):
        self.path = path
        entries = [entry for entry in self._archive.infolist() if _is_visible(entry.filename)]
        passed_over = kinds_passed_over(PurePosixPath(entry.filename).name for entry in entries)
        images = [entry for entry in entries if is_image_name(PurePosixPath(entry.filename).name)]
        if not images:
            raise _no_image(path, passed_over)
        self.entries = sorted(images, key=lambda entry: entry.filename)
        for entry, following in pairwise(self.entries):
            if entry.filename == following.filename:
                raise UserError(f"{path} holds {entry.filename} twice; write the archive again")
        names = [PurePosixPath(entry.filename) for entry in self.entries]
        super().__init__(str(path), names, passed_over)

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        """Archive, opened once: the directory of 50,000 files alone takes a second to read."""
        try:
            return zipfile.ZipFile(self.path)
        except Exception as error:  # a damaged directory: a dozen types
            raise UserError(
                f"{self.path} is not a zip archive: {brief(error)}; write it again"
            ) from None

    def _stream(self, number: int) -> BinaryIO:
        entry = self.entries[number]
        if entry.file_size > MOST_BYTES:
            raise UserError(
                f"{self._called(number)} takes {entry.file_size / 1e9:.1f} GB, no image does; "
                "remove it"
            )
        try:
            return io.BytesIO(self._archive.read(entry))
        except Exception as error:  # zipfile, zlib, lzma; a password
            raise UserError(
                f"{self._called(number)} cannot be read: {brief(error)}; write the archive again"
            ) from None

    def _called(self, number: int) -> str:
        return f"{self.entries[number].filename} in {self.path}"


def _is_visible(name: str) -> bool:
    """True if an entry is a file, neither in a hidden folder nor added by macOS."""
    path = PurePosixPath(name)
    hidden = any(part[0] == "." or part == "__MACOSX" for part in path.parts)
    return bool(path.name) and not name.endswith("/") and not hidden


def _no_image(place: Path, inside: Counter[str]) -> UserError:
    """Describe the content that is there instead."""
    found = f"; {describe_passed_over(inside)}" if inside else "; it is empty"
    return UserError(
        f"{place} holds no image (looked for {', '.join(EXTENSIONS)} at any depth){found}; give "
        "the place of the images"
    )


SAMPLE_IT = "make samples by sample/generate.py --checkpoint {path} and give their folder"
BUILT_IN = {"digits:train": "train", "digits:held-out": "held-out", "digits": "held-out"}


@dataclass(frozen=True)
class Manifest:
    """Sampler's manifest beside its archive. facts: the JSON; the other fields are parts of it."""

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
    """Open a set of images of any kind in `docs/evaluation.md`; a UserError says what to do.

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
    """Return the path, or the archive in a folder written by `sample/generate.py`."""
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
    """Refuse our folders without an image set: their figures would be read as images."""
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
    """Refuse to compare images of different size. what: the expected size.

    The numbers of channels may differ: see `common_channels`.
    """
    if other.shape[:2] != samples.shape[:2]:
        raise UserError(
            f"{other.name} has images of {other.shape[:2]}, the samples {samples.shape[:2]} "
            f"(height, width); give {what} of the samples' size"
        )


def common_channels(samples: ImageSet, other: ImageSet) -> int:
    """Channels in which to compare two sets: one grey channel equals three equal ones.

    If only one set has three: 1 if all of its images are grey, else 3.
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

    Refuse one that was written for another archive or holds other than a sampler's manifest.
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
    """Path of the manifest of an archive."""
    return archive_of(samples).with_suffix(".json")


def read_pixels(file: Path) -> np.ndarray:
    """An image file as uint8 (H, W, 3)."""
    try:
        return np.asarray(read_rgb(file))
    except BadImage as error:
        raise UserError(str(error)) from None
