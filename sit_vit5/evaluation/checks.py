"""Likely mistakes in a comparison, found in its files: those that cost users most time.

`find_mistakes` judges what the pass over the images saw (`observing.py`), the manifest and the
reference. A new check is one function and one line in `CHECKS`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sit_vit5.data.transforms import describe_passed_over
from sit_vit5.evaluation.inputs import Manifest, archive_of, manifest_path
from sit_vit5.evaluation.observations import Observations
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.reference import IMAGES, POOL_KEYS, ReferenceFile
from sit_vit5.report.published import PUBLISHED_SAMPLES
from sit_vit5.utils.arrays import members
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import read_json

LOSSY = {"JPEG", "WEBP"}  # Pillow's names
# DiT's demonstration samples at 4, its FID at 1.5; SiT's and REPA's FIDs are at 1.25 to 1.8.
DEMO_SCALE = 3.0
# With so many samples per class, random labels leave no class out: 1,000 exp(-20) is 2e-6.
CERTAIN = 20
SIDES = (32, 64, 128, 256, 512, 1024)  # in the names of references


@dataclass(frozen=True)
class Finding:
    """Remark on a result. warning: the number is probably of no use."""

    level: Literal["note", "warning"]
    text: str


@dataclass(frozen=True)
class Evidence:
    """Inputs of a comparison.

    samples_path, reference_path: as the user gave them; samples_sha256, reference_sha256: of files.
    features: the extractor's name. reference: where it is an npz; reference_images: those that
    metrics use, if any. seen, reference_seen: of the images, if there was a pass over them.
    """

    samples: ImageSet
    samples_path: str
    reference_path: str
    features: str = "inception"
    samples_sha256: str | None = None
    reference_sha256: str | None = None
    manifest: Manifest | None = None
    reference: ReferenceFile | None = None
    reference_images: ImageSet | None = None
    seen: Observations | None = None
    reference_seen: Observations | None = None

    @property
    def published(self) -> bool:
        """True if papers report values of such features, so that the protocol matters."""
        return self.features != "pixels"

    @property
    def sampler(self) -> dict:
        """The sampler's settings, {} if not known."""
        facts = self.manifest.facts if self.manifest else {}
        return (facts.get("settings") or {}).get("sampler", {})


def find_mistakes(evidence: Evidence) -> list[Finding]:
    """Findings of all checks, warnings first."""
    found = [finding for check in CHECKS for finding in check(evidence)]
    return sorted(found, key=lambda finding: finding.level != "warning")


def same_set(evidence: Evidence) -> Iterator[Finding]:
    """The reference itself as samples, or files in the wrong order."""
    sha256 = evidence.samples_sha256
    if sha256 is not None and sha256 == evidence.reference_sha256:
        yield Finding("warning", "samples and reference are the same file: the distance is 0")
    path = archive_of(evidence.samples_path)
    statistics = path.suffix.lower() == ".npz" and set(POOL_KEYS) <= set(members(path))
    if statistics or (evidence.manifest is None and _has_manifest(evidence.reference_path)):
        what = "holds statistics as a reference does" if statistics else "has no manifest"
        other = " and the reference has one" if not statistics else ""
        yield Finding("warning", f"{path.name} {what}{other}: did you swap samples and reference?")


def _has_manifest(text: str) -> bool:
    """True if a sampler's manifest is beside a file."""
    if not (archive_of(text).is_file() and manifest_path(text).is_file()):
        return False
    try:
        return "class_names" in read_json(manifest_path(text))
    except UserError:  # some other JSON
        return False


def sample_count(evidence: Evidence) -> Iterator[Finding]:
    """Number of samples unlike the protocol's or the manifest's; or no manifest."""
    count, manifest = evidence.samples.count, evidence.manifest
    if count != PUBLISHED_SAMPLES and evidence.published:
        yield Finding(
            "note",
            f"{count:,} samples, not the {PUBLISHED_SAMPLES:,} of published values: the distance "
            "depends on the number; compare with equal numbers only",
        )
    if manifest is None:
        yield Finding("note", "no manifest beside the samples: the sampler's settings are unknown")
        return
    settings = manifest.facts.get("settings") or {}
    said = len(manifest.labels) or settings.get("num_samples", count)
    if isinstance(said, int) and said != count:
        yield Finding(
            "warning", f"the manifest tells of {said:,} images, the archive holds {count:,}"
        )
    if manifest.facts.get("complete") is False:
        yield Finding("warning", "the manifest says that the samples are not complete")


def labels(evidence: Evidence) -> Iterator[Finding]:
    """Random or balanced labels, or few of the classes."""
    manifest = evidence.manifest
    if manifest is None or not manifest.labels or len(manifest.class_names) < 2:
        return
    classes = len(manifest.class_names)
    if max(manifest.labels) >= classes:
        yield Finding("warning", f"the manifest has labels without a name among its {classes}")
        return
    counts = np.bincount(manifest.labels, minlength=classes)
    empty = int((counts == 0).sum())
    if empty and counts.sum() >= CERTAIN * classes:
        yield Finding("warning", f"{empty} of {classes} classes have no sample")
    elif not evidence.published:
        return
    elif counts.max() - counts.min() <= 1:
        yield Finding(
            "note",
            "labels are class-balanced; ADM's protocol, DiT and SiT draw them at random, which "
            "gives a somewhat larger distance: say which in a table",
        )
    else:
        yield Finding(
            "note",
            "labels are random, as in ADM's protocol, DiT and SiT; values with class-balanced "
            "labels are somewhat smaller: compare like with like",
        )


def file_formats(evidence: Evidence) -> Iterator[Finding]:
    """Files that are no images, JPEGs on one side, several folders."""
    sides = (("samples", evidence.samples), ("reference", evidence.reference_images))
    for name, images in sides:
        formats = images.formats if images is not None else {}
        for lossy in formats.keys() & LOSSY:
            yield Finding(
                "warning" if name == "samples" else "note",
                f"{name}: {formats[lossy]:,} lossy files ({lossy}); compression shifts distances: "
                "write PNG or npz, and compare with values of the same format only",
            )
        if images is not None and images.passed_over:
            yield Finding("warning", f"{name}: {describe_passed_over(Counter(images.passed_over))}")
        if images is not None and images.folders > 1:
            yield Finding(
                "note", f"{name}: the images of {images.folders} folders are taken as one set"
            )


def reference_kind(evidence: Evidence) -> Iterator[Finding]:
    """Reference without its size, or of part of a data set."""
    reference, given = evidence.reference, archive_of(evidence.reference_path)
    if _has_manifest(evidence.reference_path) and (reference is None or reference.kind == IMAGES):
        yield Finding("warning", f"{given.name} are samples, not real images")
    if reference is None:
        return
    height = evidence.samples.shape[0]
    if reference.image_shape is None:
        named = [side for side in SIDES if re.search(rf"(?<!\d){side}(?!\d)", reference.path.stem)]
        if named and height not in named:
            yield Finding(
                "warning",
                f"{reference.path.name} names {named[0]} pixels, the samples have {height}",
            )
        else:
            yield Finding(
                "note",
                f"{reference.path.name} does not tell the size of its images; make sure that it is "
                f"{height}",
            )


def sampling(evidence: Evidence) -> Iterator[Finding]:
    """Settings of demonstrations and of drafts."""
    sampler = evidence.sampler
    if sampler.get("precision") == "bf16":
        yield Finding(
            "note", "sampled in bf16; final numbers are sampled with --precision tf32 or fp32"
        )
    guidance = sampler.get("guidance")
    guidance = guidance if isinstance(guidance, dict) else {}
    scale, interval = guidance.get("scale"), guidance.get("interval")
    everywhere = interval in (None, [0.0, 1.0])
    if isinstance(scale, (int, float)) and scale >= DEMO_SCALE and everywhere:
        yield Finding(
            "warning",
            f"guidance scale {scale:g} is one for pictures: distances are published for about "
            "1.25 to 1.8; find the best with evaluate/sweep.py",
        )


def pixels(evidence: Evidence) -> Iterator[Finding]:
    """Images that occur twice, images of one colour, and copies of the reference's."""
    seen = evidence.seen
    if seen is None:
        return
    if plain := np.flatnonzero(seen.plain).tolist():
        yield Finding(
            "warning",
            f"samples of a single colour: {len(plain):,}, such as {plain[0]}; failed decoding?",
        )
    _, first, place = np.unique(seen.digests, return_index=True, return_inverse=True)
    earlier = first[place]  # the first image with the same pixels
    again = np.flatnonzero((earlier != np.arange(len(earlier))) & ~seen.plain)
    if len(again):
        pairs = ", ".join(f"{earlier[n]} and {n}" for n in again[:3])
        yield Finding(
            "warning",
            f"samples that repeat an earlier one: {len(again):,}, such as {pairs}; the same seed "
            "on several processes?",
        )
    if evidence.reference_seen is not None:
        copies = np.flatnonzero(np.isin(seen.digests, evidence.reference_seen.digests))
        if len(copies):
            yield Finding(
                "warning",
                f"samples that are images of the reference: {len(copies):,}, such as {copies[0]}",
            )


CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    same_set,
    sample_count,
    labels,
    file_formats,
    reference_kind,
    sampling,
    pixels,
)
