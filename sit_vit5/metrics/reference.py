"""Reference files: the statistics of a real data set, and some of its images.

What others publish is read too: ADM's (`VIRTUAL_imagenet256_labeled.npz`) and plain `mu` and
`sigma`, as of pytorch-fid, JiT and EDM's older npz files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le, Lt
from scipy import linalg

from sit_vit5.metrics.image_sets import IMAGES_KEY, ImageSet, npz_set
from sit_vit5.metrics.statistics import Gaussian, Statistics
from sit_vit5.utils.arrays import StoredArray, find_member, members, write_npz
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import damaged, file_hash, parse_json

Size = Annotated[int, Ge(1), Lt(2**63)]
# (mean, covariance) of: all features, ADM's spatial features.
POOL_KEYS, SPATIAL_KEYS = ("mu", "sigma"), ("mu_s", "sigma_s")
LABELS_KEYS, FACTS_KEY = ("labels", "arr_1"), "facts"
SCHEMA = 1
# kind of file -> what it is, for people.
OURS, ADM, STATISTICS, IMAGES = "sit_vit5", "ADM", "statistics", "images"
KINDS = {
    OURS: "made by evaluate/reference.py: statistics, images and how they were made",
    ADM: "in ADM's layout: statistics of a data set, and images of it for precision and recall",
    STATISTICS: "statistics alone, as of pytorch-fid, JiT and EDM: no images, so neither their "
    "size is known nor precision and recall can be had",
    IMAGES: "images alone: their statistics are computed",
}
SYMMETRY = 1e-3  # of the largest entry; published covariances are fp32 or fp64
NEGATIVE = 1e-6  # of the largest eigenvalue: what rounding of fp32 statistics makes of a zero


@dataclass(frozen=True)
class Facts:
    """The types of the facts in a file of ours."""

    extractor: dict
    image_shape: tuple[Size, Size, Annotated[int, Ge(1), Le(4)]] | None = None
    count: Size | None = None
    class_names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReferenceFile:
    """What an npz offers to compare samples with.

    pool: Gaussian of the whole data set's features, for the Frechet distance; spatial: of ADM's
    spatial features, for sFID; images: for precision, recall and KID, or for everything where there
    are no statistics; labels: their class numbers, (N,). facts: how a file of ours was made, else
    empty. kind: a key of `KINDS`.
    """

    path: Path
    sha256: str
    kind: str
    pool: Gaussian | None = None
    spatial: Gaussian | None = None
    images: ImageSet | None = None
    labels: np.ndarray | None = None
    facts: dict = field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(H, W, C) of the images behind the statistics; None: the file does not tell."""
        if self.images is not None:
            return self.images.shape
        shape = self.facts.get("image_shape")
        return tuple(shape) if shape else None

    @property
    def count(self) -> int | None:
        """How many images the statistics are of; None: the file does not tell."""
        return self.facts.get("count")

    def check_covariances(self) -> None:
        """Refuses statistics whose distance to anything would be no distance."""
        for name, gaussian in (("sigma", self.pool), ("sigma_s", self.spatial)):
            least = 0.0 if gaussian is None else negative_eigenvalue(gaussian.covariance)
            if least:
                raise UserError(
                    f"{self.path}: {name} is NOT a covariance: smallest eigenvalue {least:.3g}; "
                    "the file is damaged, download or make it again"
                )

    def check_size(self, shape: tuple[int, int, int]) -> None:
        """Refuses samples (H, W, C) of another size; channels are compared elsewhere."""
        if self.image_shape is not None and self.image_shape[:2] != shape[:2]:
            raise UserError(
                f"{self.path} is a reference of images of {self.image_shape[:2]}, the samples "
                f"{shape[:2]} (height, width); give a reference of the samples' size"
            )

    def has_statistics_of(self, extractor: dict) -> bool:
        """Whether the stored statistics are of this extractor's features; extractor: identity.

        A file without facts is taken to be Inception's, whose weights are not known.
        """
        if self.pool is None:
            return False
        if not self.facts:
            return extractor["features"] == "inception"
        return self.facts["extractor"] == extractor

    def check_extractor(self, extractor: dict) -> None:
        """Refuses to use the stored statistics with another extractor's; says what differs."""
        if not self.has_statistics_of(extractor):
            stored = self.facts.get("extractor", {"features": "inception"})
            keys = sorted(stored.keys() | extractor.keys())
            differ = [
                f"{key} {stored.get(key)}, here {extractor.get(key)}"
                for key in keys
                if stored.get(key) != extractor.get(key)
            ]
            raise UserError(
                f"the statistics in {self.path} are of another extractor ({'; '.join(differ)}); "
                "use the same one, or make a reference with evaluate/reference.py make"
            )


def read_reference(path: Path) -> ReferenceFile:
    """A reference npz of any of `KINDS`. Images stay on the disk."""
    if path.suffix.lower() in (".pkl", ".pickle"):
        raise UserError(
            f"{path} is a pickle, which may run foreign code when read; save its mean and "
            "covariance as mu and sigma: np.savez('ref.npz', mu=mean, sigma=covariance)"
        )
    keys = members(path)
    stored = set(POOL_KEYS) <= set(keys)
    if not stored and IMAGES_KEY not in keys:
        raise UserError(
            f"{path} holds {', '.join(keys) or 'nothing'}; expected {IMAGES_KEY} (uint8 images "
            "N, H, W, C), or mu and sigma, or both"
        )
    images = npz_set(path) if IMAGES_KEY in keys else None
    facts = read_facts(path)
    kind = OURS if facts else IMAGES if not stored else STATISTICS if images is None else ADM
    pool = read_gaussian(path, POOL_KEYS) if stored else None
    spatial = read_gaussian(path, SPATIAL_KEYS) if set(SPATIAL_KEYS) <= set(keys) else None
    return ReferenceFile(
        path,
        file_hash(path),
        kind,
        pool,
        spatial,
        images,
        _labels(path, images, facts.get("class_names", ())),
        facts,
    )


def read_facts(path: Path) -> dict:
    """How a file of ours was made; {} of others."""
    there = members(path)
    if FACTS_KEY not in there:
        return {}
    text = str(find_member(path, there[FACTS_KEY]).read())
    source, remedy = f"{path}: its facts", "make it again"
    facts = parse_json(text, source=source, remedy=remedy)
    if facts.get("schema") != SCHEMA:
        reason = f"schema {facts.get('schema')}, this version reads {SCHEMA}"
        raise UserError(damaged(source, reason, remedy))
    parse_json(text, Facts, source=source, remedy=remedy)
    return facts


def _labels(path: Path, images: ImageSet | None, names: Sequence[str]) -> np.ndarray | None:
    """Class numbers of the images, if the file has them. names: of the classes, if any."""
    there = members(path)
    for key in (key for key in LABELS_KEYS if key in there and images is not None):
        found = find_member(path, there[key])
        if found.shape == (images.count,) and found.dtype.kind in "iu":
            labels, most = found.read(), len(names) or 2**63
            wrong = [int(label) for label in (labels.min(), labels.max()) if not 0 <= label < most]
            if wrong:
                named = f" of its {most:,} classes" if names else ""
                raise UserError(
                    f"{path}: {key} holds {wrong[0]}, the number of no class{named}; make it again"
                )
            return labels.astype(np.int64)
    return None


def read_gaussian(path: Path, keys: tuple[str, str]) -> Gaussian:
    """Mean and covariance under these keys: numbers, finite, fitting, symmetric."""
    there = members(path)
    first, second = (find_member(path, there[key]) for key in keys)
    named = " and ".join(keys)
    if {first.dtype.kind, second.dtype.kind} - set("fiu"):
        raise UserError(f"{path}: {named} are not numbers: {first.dtype}, {second.dtype}")
    if len(first.shape) != 1 or second.shape != first.shape * 2 or 0 in first.shape:
        raise UserError(f"{path}: {_of(first, keys[0])} and {_of(second, keys[1])} do not fit")
    mean, covariance = (np.asarray(array.read(), np.float64) for array in (first, second))
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise UserError(f"{path}: {named} are not all finite; the file is of no use")
    skew = np.abs(covariance - covariance.T).max(initial=0)
    if skew > SYMMETRY * np.abs(covariance).max(initial=0):
        raise UserError(f"{path}: {keys[1]} is not symmetric, so it is no covariance")
    if covariance.diagonal().min() < 0:
        raise UserError(f"{path}: {keys[1]} has negative variances, so it is no covariance")
    return Gaussian(mean, covariance)


def negative_eigenvalue(covariance: np.ndarray) -> float:
    """The smallest eigenvalue of a symmetric matrix, if it is below zero beyond rounding; else 0.

    Cholesky's factorisation, shifted by the rounding that is allowed, settles most cases in a tenth
    of the time.
    """
    shift = NEGATIVE * covariance.diagonal().max(initial=0)
    shifted = covariance + shift * np.eye(len(covariance))
    _, failed = linalg.lapack.dpotrf(shifted, lower=1, overwrite_a=1)
    if shift and not failed:
        return 0.0
    values = np.linalg.eigvalsh(covariance)
    return float(values[0]) if values[0] < -NEGATIVE * max(values[-1], 0) else 0.0


def _of(array: StoredArray, key: str) -> str:
    return f"{key} {array.shape}"


def write_reference(
    path: Path,
    *,
    pool: Statistics | Gaussian,
    spatial: Statistics | Gaussian | None,
    images: np.ndarray,
    labels: np.ndarray | None,
    facts: Mapping[str, object],
) -> None:
    """Writes a reference in ADM's layout with its facts, in one step.

    images: uint8 (N, H, W, C), perhaps a map; labels: (N,); facts: JSON values.
    """
    arrays = dict(zip(POOL_KEYS, (pool.mean, pool.covariance), strict=True))
    if spatial is not None:
        arrays |= zip(SPATIAL_KEYS, (spatial.mean, spatial.covariance), strict=True)
    arrays[IMAGES_KEY] = images
    if labels is not None:
        arrays[LABELS_KEYS[0]] = labels
    arrays[FACTS_KEY] = np.array(json.dumps({"schema": SCHEMA, **facts}, allow_nan=False))
    write_npz(path, arrays)
