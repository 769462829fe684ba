"""Says what is in a reference or in any other set of images, and whether it is sound (row E14)."""

from __future__ import annotations

import numpy as np

from sit_vit5.arrays import find_member, members
from sit_vit5.evaluation.inputs import archive_of, hash_of, open_image_set
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.reference_file import KINDS, NEGATIVE, ReferenceFile, read_reference
from sit_vit5.metrics.statistics import Gaussian

# key -> what it is for
PURPOSES = {
    "mu": "FID: mean of the features of the whole data set",
    "sigma": "FID: covariance of the same",
    "mu_s": "sFID: mean of the spatial features of the whole data set",
    "sigma_s": "sFID: covariance of the same",
    "arr_0": "precision, recall, KID: some of the images",
    "arr_1": "class numbers of the images (ADM)",
    "labels": "class numbers of the images",
    "facts": "how the file was made",
}


def inspect(text: str) -> tuple[str, bool]:
    """A description, and whether the statistics are sound."""
    path = archive_of(text)
    if path.suffix.lower() != ".npz" or not path.is_file():
        return describe_images(open_image_set(text), hash_of(text)), True
    reference = read_reference(path)
    lines = [*describe_file(reference), ""]
    if reference.images is not None:
        lines.append(_images_line(reference.images))
    sound = True
    for name, gaussian in (("mu, sigma", reference.pool), ("mu_s, sigma_s", reference.spatial)):
        if gaussian is not None:
            said, good = check_gaussian(gaussian)
            lines.append(f"{name}: {said}")
            sound &= good
    return "\n".join(lines), sound


def describe_file(reference: ReferenceFile) -> list[str]:
    """Every array with its purpose, the kind of file, its hash and the facts of its making."""
    rows = [
        (info.described.split(" of ")[0], f"{info.dtype} {info.shape}")
        for info in (find_member(reference.path, m) for m in members(reference.path).values())
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [
        f"{reference.path}",
        f"{reference.kind}: {KINDS[reference.kind]}",
        f"sha256 {reference.sha256}",
        "",
        *(
            f"  {key:<{widths[0]}}  {what:<{widths[1]}}  {PURPOSES.get(key, 'not used here')}"
            for key, what in rows
        ),
        *(["", *_facts(reference.facts)] if reference.facts else []),
    ]


def _facts(facts: dict, prefix: str = "") -> list[str]:
    """`name value` of each fact; of a long list its length."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += _facts(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > 12:
            lines.append(f"  {prefix}{key}: {len(value)} of them, {value[0]} ... {value[-1]}")
        else:
            lines.append(f"  {prefix}{key}: {value}")
    return lines


def describe_images(images: ImageSet, sha256: str | None) -> str:
    """Of a set without statistics."""
    return "\n".join([images.name, *([f"sha256 {sha256}"] if sha256 else []), _images_line(images)])


def _images_line(images: ImageSet) -> str:
    height, width, channels = images.shape
    formats = ", ".join(f"{count} {name}" for name, count in images.formats.items())
    where = f" in {images.folders} folders: {formats}" if formats else ""
    return f"{images.count:,} images, {width}x{height} pixels, {channels} channels{where}"


def check_gaussian(gaussian: Gaussian) -> tuple[str, bool]:
    """Whether a covariance is one: symmetric and finite by `read_gaussian`, so no eigenvalue
    below zero beyond rounding."""
    values = np.linalg.eigvalsh(gaussian.covariance)
    largest, least = float(values[-1]), float(values[0])
    rank = int((values > largest * len(values) * np.finfo(np.float64).eps).sum())
    text = f"{len(values):,} features, finite, symmetric, rank {rank:,}, trace {values.sum():.6g}"
    if least < -NEGATIVE * max(largest, 0):
        return f"{text}; NOT a covariance: smallest eigenvalue {least:.3g}, damaged file?", False
    full = rank == len(values)
    why = "" if full else " (rank-deficient: few images, or features that never vary)"
    return f"{text}{why}; a covariance", True
