"""Real data sets for evaluation, through the loader and the crop of training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from sit_vit5.config import DataConfig, RealDataConfig, RealImagesConfig
from sit_vit5.data import Source, build_source
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.loader import Visit, iterate_images
from sit_vit5.data.sources import number_classes
from sit_vit5.data.transforms import BadImage, refusal
from sit_vit5.evaluation.compare import Source as Reference
from sit_vit5.evaluation.inputs import (
    BUILT_IN,
    FILES,
    FolderSet,
    Manifest,
    archive_of,
    check_same_size,
    open_image_set,
)
from sit_vit5.metrics.features import Extractor, build_extractor
from sit_vit5.metrics.image_sets import IMAGES_KEY, ImageSet, runs
from sit_vit5.metrics.reference import POOL_KEYS, ReferenceFile, read_reference
from sit_vit5.utils.arrays import members
from sit_vit5.utils.errors import UserError, listed


def loader_options(options: RealImagesConfig, path: str) -> DataConfig:
    """Data options of the training loader for a path or a built-in set such as digits:held-out."""
    built_in = path in BUILT_IN
    if built_in and (options.source or options.split):
        raise UserError(f"{path} is built in; drop --source and --split")
    return DataConfig(
        source="digits" if built_in else options.source,
        path=None if built_in else path,
        split=BUILT_IN[path] if built_in else options.split or DataConfig.split,
        image_column=options.image_column,
        label_column=options.label_column,
        image_size=options.image_size,
        unconditional=options.unconditional,
        horizontal_flip=False,
        on_bad_image=options.on_bad_image,
        workers=options.workers,
    )


def open_source(options: RealImagesConfig, path: str, *, prefix: str = "--") -> Source:
    """The images of a data set; a latent cache has none. prefix: of the options' names."""
    try:
        source = build_source(loader_options(options, path))
    except UserError as error:  # it names the options as train_sit.py calls them
        raise UserError(_as_named_here(str(error), prefix)) from None
    if source.kind != "images":
        raise UserError(f"{path} is a latent cache; give the images that it was made from")
    return source


def _as_named_here(text: str, prefix: str = "--") -> str:
    """A message of training's loader with the names that these commands give its options."""
    names = "|".join(field.name.replace("_", "[_-]") for field in fields(RealImagesConfig))
    text = re.sub(rf"--data\.({names})\b", rf"{prefix}\1", text.replace("--data.path ", ""))
    return re.sub(rf"(?<![\w./-])data\.({names})\b", rf"{prefix.removeprefix('--')}\1", text)


def refuse_image(reason: str) -> UserError:
    """Error with which a bad image stops the command."""
    return UserError(_as_named_here(str(refusal(reason))))


def open_extractor(options: RealImagesConfig) -> Extractor:
    """Open the feature extractor."""
    return build_extractor(options.features, options.weights or options.inception_weights)


def image_shape(source: Source) -> tuple[int, int, int]:
    """(H, W, C) of a source's images."""
    channels, height, width = source.item_shape
    return height, width, channels


def visit_images(
    source: Source, batches: Sequence[Sequence[int]], options: RealImagesConfig
) -> Iterator[Visit]:
    """The batches of indices, decoded ahead; a bad image stops the command if so configured."""
    for visit in iterate_images(source, batches, workers=options.workers):
        if visit.bad and options.on_bad_image == "error":
            raise refuse_image(min(visit.bad.values()))
        yield visit


def good_indices(visit: Visit) -> np.ndarray:
    """Indices of the images in a visit's pixels, int64 (n,)."""
    return np.array([index for index in visit.indices if index not in visit.bad], np.int64)


_WITHOUT_CLASSES = re.compile(r"[,;] [^,;]*--real\.unconditional True\)?")


@dataclass(frozen=True)
class Matching:
    """Remarks on scores per class. warning: classes are matched by number, and the
    numbers differ; note: classes that only one side has."""

    warning: str = ""
    note: str = ""


@dataclass(frozen=True)
class RealSet:
    """labels: (N,), None if not known; class_names: of the labels, () if they are mere numbers;
    matching: of its classes and the samples'."""

    images: ImageSet
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    matching: Matching = Matching()


class LoadedSet(ImageSet):
    """Images of a training data set, cropped as training crops them, decoded ahead by workers.

    chosen: numbers of those images in the data set.
    """

    def __init__(self, name: str, source: Source, options: RealImagesConfig, chosen: Sequence[int]):
        super().__init__(name, len(chosen), image_shape(source))
        self.source, self.options, self.chosen = source, options, chosen

    def images(self, indices: Sequence[int]) -> np.ndarray:
        try:
            return np.stack([self.source.load(int(self.chosen[n]))[0] for n in indices])
        except BadImage as error:
            raise _unreadable(str(error)) from None

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        numbers = [[int(self.chosen[n]) for n in run] for run in runs(size, start, self._end(stop))]
        for visit in iterate_images(self.source, numbers, workers=self.options.workers):
            if visit.bad:
                raise _unreadable(min(visit.bad.values()))
            yield visit.pixels


def _unreadable(reason: str) -> UserError:
    return UserError(f"{reason}; write the file again or remove it")


class ChosenSet(ImageSet):
    """Some of the images of another set."""

    def __init__(self, whole: ImageSet, chosen: Sequence[int]):
        super().__init__(whole.name, len(chosen), whole.shape)
        self.whole, self.chosen = whole, np.asarray(chosen)

    def images(self, indices: Sequence[int]) -> np.ndarray:
        return self.whole.images(self.chosen[np.asarray(indices, np.intp)])


def choose_images(whole: ImageSet, chosen: Sequence[int]) -> ImageSet:
    """Selected images of a set, in this order."""
    if isinstance(whole, LoadedSet):
        numbers = np.asarray(whole.chosen)[np.asarray(chosen, np.intp)]
        return LoadedSet(whole.name, whole.source, whole.options, numbers)
    return ChosenSet(whole, chosen)


def open_real(text: str, options: RealDataConfig, samples: ImageSet, *, labelled: bool) -> RealSet:
    """A built-in set, a reference, a set of images, or a data set by training's loader.

    labelled: whether labels are needed. Refuse images of another size than the samples'.
    """
    found = _open(text, options, samples, labelled=labelled)
    check_same_size(found.images, samples, what="images")
    if labelled and found.labels is None:
        raise UserError(f"{text} has no class labels; give a data set or a reference that has")
    return found


def _open(text: str, options: RealDataConfig, samples: ImageSet, *, labelled: bool) -> RealSet:
    if text in BUILT_IN:
        return _of_digits(open_image_set(text))
    path = archive_of(text)
    if path.suffix.lower() in FILES or path != Path(text):
        return RealSet(open_image_set(text))
    if path.suffix.lower() == ".npz" and path.is_file() and set(POOL_KEYS) <= set(members(path)):
        return _of_file(read_reference(path))
    return _of_data(text, options, samples, labelled=labelled)


def _of_digits(images: ImageSet) -> RealSet:
    digits = Digits(BUILT_IN[images.name])
    return RealSet(images, digits.labels, digits.class_names)


def _of_file(file: ReferenceFile) -> RealSet:
    if file.images is None:
        raise UserError(f"{file.path} holds statistics only, no {IMAGES_KEY}; give the images")
    return RealSet(file.images, file.labels, tuple(file.facts.get("class_names", ())))


def _of_data(text: str, options: RealDataConfig, samples: ImageSet, *, labelled: bool) -> RealSet:
    """Open a set through the training loader, whose crop is square."""
    height, width, _ = samples.shape
    if height != width:
        raise UserError(f"{text} is cropped to squares, the samples are {width}x{height}")
    loader = RealImagesConfig(
        source=options.source,
        split=options.split,
        image_column=options.image_column,
        label_column=options.label_column,
        workers=options.workers,
        image_size=height,
        unconditional=not labelled,
    )
    try:
        source = open_source(loader, text, prefix="--real.")
    except UserError as error:  # its remedy, to drop the classes, does not apply here
        raise UserError(_WITHOUT_CLASSES.sub("", str(error))) from None
    images = LoadedSet(text, source, loader, range(len(source)))
    if not source.class_names:
        return RealSet(images)
    return RealSet(images, source.labels, source.class_names)


def labelled_reference(reference: Reference) -> RealSet | None:
    """The reference's own images with their classes; None if it has no images or no labels."""
    images = reference.images
    if images is None:
        return None
    if images.name in BUILT_IN:
        return _of_digits(images)
    if reference.file is not None:
        found = _of_file(reference.file)
        return found if found.labels is not None else None
    if isinstance(images, FolderSet) and images.folders > 1:
        names = np.array([file.parent.name for file in images.files])
        return RealSet(images, *number_classes(names, images.name))
    return None


def samples_numbers(real: RealSet, class_names: Sequence[str]) -> np.ndarray:
    """Each real image's class as the samples number it, by its name; -1: they have no such class.

    A name shared by two of the samples' classes is ignored. Without names on one side equal
    numbers are equal classes.
    """
    if not (real.class_names and class_names) or real.class_names == tuple(class_names):
        return real.labels
    times = Counter(class_names)
    numbers = {name: number for number, name in enumerate(class_names) if times[name] == 1}
    known = np.array([numbers.get(name, -1) for name in real.class_names])
    return known[real.labels]


def check_matching(real: RealSet, manifest: Manifest) -> Matching:
    """Check that the classes of both sides can be the same."""
    sides = ((manifest.class_names, manifest.labels), (real.class_names, real.labels))
    by_number = not all(names for names, _ in sides)
    numbers = [_numbers(names, labels, by_number) for names, labels in sides]
    if None not in numbers and numbers[0] != numbers[1]:
        (first, last), (real_first, real_last) = numbers
        return Matching(
            f"classes are matched by number, and the numbers differ: samples {first} to {last}, "
            f"{real.images.name} {real_first} to {real_last}; if a number does not mean the same "
            "class on both sides, no score per class means anything: give class names on both"
        )
    ours, theirs = set(manifest.class_names), set(real.class_names)
    if not (ours and theirs):
        return Matching()
    parts = []
    for what, names, other in (
        ("the samples", manifest.class_names, theirs),
        (real.images.name, real.class_names, ours),
    ):
        if alone := list(dict.fromkeys(name for name in names if name not in other)):
            parts.append(f"{len(alone):,} of {what} alone: {listed(alone, most=6)}")
    return Matching(note=f"classes without a counterpart: {'; '.join(parts)}" if parts else "")


def _numbers(
    names: Sequence[str], labels: Sequence[int], by_number: bool
) -> tuple[int, int] | None:
    """The smallest and the largest number of a class; None where the classes go by their names."""
    if not names:
        return int(np.min(labels)), int(np.max(labels))
    if all(name.isdecimal() and len(name) < 10 for name in names):
        return min(map(int, names)), max(map(int, names))
    return (0, len(names) - 1) if by_number else None
