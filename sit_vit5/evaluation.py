"""A set of samples against a reference: reading both, the metrics, the report."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sit_vit5 import __version__
from sit_vit5.config import MetricsConfig
from sit_vit5.data.digits import Digits
from sit_vit5.data.folder import list_images
from sit_vit5.data.images import EXTENSIONS, BadImage, read_rgb
from sit_vit5.errors import UserError
from sit_vit5.files import write_json
from sit_vit5.metrics.agreement import class_agreement
from sit_vit5.metrics.extractors import Extractor, build_extractor, extract_statistics
from sit_vit5.metrics.frechet import frechet_distance, self_test
from sit_vit5.metrics.image_sets import (
    IMAGES_KEY,
    ImageSet,
    array_set,
    check_images,
    npz_array,
    npz_keys,
    npz_set,
)
from sit_vit5.metrics.statistics import Statistics

BUILT_IN = {"digits:train": "train", "digits:held-out": "held-out", "digits": "held-out"}
LOSSY = (".jpg", ".jpeg", ".webp")


def evaluate(options: MetricsConfig) -> dict:
    """All metrics of one set of samples, as JSON values, with what is needed to trust them."""
    self_test()
    samples, manifest = open_image_set(options.samples), read_manifest(Path(options.samples))
    extractor = build_extractor(options.features, options.inception_weights)
    notes = sample_notes(samples, manifest)
    reference = reference_statistics(options, extractor, samples)
    found = _statistics(samples, extractor, options, "samples")
    if found.count <= len(found.mean):
        notes.append(
            f"{found.count} samples for {len(found.mean)} features: the covariance is rank-"
            "deficient and the distance biased upwards; compare equal counts only"
        )
    result = {
        "samples": samples.name,
        "count": samples.count,
        "reference": options.reference,
        "reference_count": reference.count or None,
        "extractor": extractor.identity,
        "frechet_distance": _distance(found, reference),
    }
    if options.floor:
        floor = open_image_set(options.floor)
        _check_same_size(floor, samples)
        floor_statistics = _statistics(floor, extractor, options, "floor")
        result["floor"] = options.floor
        result["floor_frechet_distance"] = _distance(floor_statistics, reference)
    if options.agreement:
        result["agreement"] = digits_agreement(options, samples, manifest)
    return result | {
        "notes": notes,
        "versions": {
            "sit_vit5": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "manifest": manifest,
    }


def report(result: dict) -> str:
    """The result as a table for the screen."""
    name = {"inception": "FID", "pixels": "Frechet distance of pixels"}.get(
        result["extractor"]["features"], "Frechet distance"
    )
    count = "50K" if result["count"] == 50_000 else result["count"]
    rows = [(f"{name}-{count}", f"{result['frechet_distance']:.4f}", result["reference"])]
    if "floor" in result:
        rows.append(
            (
                f"floor: {result['floor']}",
                f"{result['floor_frechet_distance']:.4f}",
                result["reference"],
            )
        )
    if "agreement" in result:
        agreement = result["agreement"]
        rows += [
            ("samples classified as asked", f"{agreement['samples']:.1%}", agreement["classifier"]),
            (
                "real held-out classified right",
                f"{agreement['held_out']:.1%}",
                agreement["classifier"],
            ),
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]
    sampler = (result["manifest"] or {}).get("settings", {}).get("sampler")
    if sampler:
        lines.append("sampler: " + ", ".join(f"{key} {value}" for key, value in sampler.items()))
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def save_report(result: dict, options: MetricsConfig) -> Path:
    """Writes the JSON beside the samples, or where asked."""
    samples = Path(options.samples)
    folder = samples if samples.is_dir() else samples.parent
    out = Path(options.out) if options.out else folder / "metrics.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    return out


def open_image_set(text: str) -> ImageSet:
    """An npz with arr_0, a folder of images of one size, or a built-in set."""
    if text in BUILT_IN:
        return array_set(text, Digits(BUILT_IN[text]).images)
    path = Path(text)
    if path.is_dir():
        return folder_set(path)
    if path.is_file():
        return npz_set(path)
    raise UserError(
        f"{text} does not exist; give an npz, a folder of images, or one of {', '.join(BUILT_IN)}"
    )


def folder_set(folder: Path) -> ImageSet:
    """All images below a folder in order of their names; one size, as stored, never resized."""
    files = list_images(folder)
    if not files:
        raise UserError(f"{folder} holds no image (looked for {', '.join(EXTENSIONS)} below it)")
    shape = _read(files[0]).shape

    def batches(size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(files), size):
            images = [_read(file) for file in files[start : start + size]]
            for file, image in zip(files[start : start + size], images, strict=True):
                if image.shape != shape:
                    raise UserError(
                        f"{file} is {image.shape[1]}x{image.shape[0]}, the others "
                        f"{shape[1]}x{shape[0]}; all images must have one size"
                    )
            yield np.stack(images)

    check_images(str(folder), (len(files), *shape), np.dtype(np.uint8))
    return ImageSet(str(folder), len(files), shape, batches)


def read_manifest(samples: Path) -> dict | None:
    """The manifest beside an archive (samples.json for samples.npz), if there is one."""
    path = samples.with_suffix(".json")
    if samples.is_dir() or not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return manifest if isinstance(manifest, dict) else None


def sample_notes(samples: ImageSet, manifest: dict | None) -> list[str]:
    """What a reader of the numbers should know of the samples."""
    notes = []
    if manifest is None:
        notes.append("no manifest beside the samples: the sampler's settings are unknown")
    if Path(samples.name).is_dir():
        lossy = [file for file in list_images(Path(samples.name)) if file.suffix.lower() in LOSSY]
        if lossy:
            notes.append(f"{len(lossy)} lossy files such as {lossy[0].name} shift the distance")
    return notes


def reference_statistics(
    options: MetricsConfig, extractor: Extractor, samples: ImageSet
) -> Statistics:
    """Stored `mu` and `sigma`, or those of the reference's images. A stored count is unknown: 0."""
    path = Path(options.reference)
    if path.is_file():
        keys = set(npz_keys(path))
        stored = {"mu", "sigma"} <= keys
        if stored and extractor.identity["features"] == "inception":
            if IMAGES_KEY in keys:  # ADM's files hold both; the images tell the size
                _check_same_size(npz_set(path), samples)
            return _stored_statistics(path)
        if IMAGES_KEY not in keys:
            found = "Inception statistics" if stored else ", ".join(sorted(keys)) or "nothing"
            raise UserError(
                f"{path} holds {found}; expected {IMAGES_KEY}"
                + ("; or use --features inception" if stored else ", or mu and sigma")
            )
    reference = open_image_set(options.reference)
    _check_same_size(reference, samples)
    return _statistics(reference, extractor, options, "reference")


def digits_agreement(options: MetricsConfig, samples: ImageSet, manifest: dict | None) -> dict:
    """The share of samples that a classifier of real digits gives the asked class."""
    if options.agreement != "digits":
        raise UserError(f"agreement {options.agreement!r} is not a labelled built-in set: digits")
    if not manifest or len(manifest.get("labels", [])) != samples.count:
        raise UserError(
            f"agreement needs the asked labels: {Path(options.samples).with_suffix('.json')} is "
            "missing or of another set"
        )
    train, held_out = Digits("train"), Digits("held-out")
    _check_same_size(array_set("digits", held_out.images), samples)
    if manifest.get("class_names") != list(train.class_names):
        raise UserError(f"the samples' classes {manifest.get('class_names')} are not the digits")
    images = np.concatenate(list(samples.batches(options.batch_size)))
    agreement = class_agreement(
        train=(train.images, train.labels),
        held_out=(held_out.images, held_out.labels),
        samples=(images, np.array(manifest["labels"])),
    )
    return {
        "classifier": "support vectors on digits:train",
        "samples": agreement.samples,
        "held_out": agreement.held_out,
        "per_class": list(agreement.per_class),
    }


def _statistics(
    images: ImageSet, extractor: Extractor, options: MetricsConfig, title: str
) -> Statistics:
    return extract_statistics(
        extractor, images.batches(options.batch_size), title=title, total=images.count
    )


def _stored_statistics(path: Path) -> Statistics:
    mean, covariance = npz_array(path, "mu"), npz_array(path, "sigma")
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise UserError(f"{path}: mu {mean.shape} and sigma {covariance.shape} do not fit together")
    return Statistics(0, mean.astype(np.float64), covariance.astype(np.float64))


def _distance(a: Statistics, b: Statistics) -> float:
    if a.mean.shape != b.mean.shape:
        raise UserError(
            f"samples have {len(a.mean)} features, the reference {len(b.mean)}; it was made with "
            "another extractor"
        )
    return frechet_distance(a.mean, a.covariance, b.mean, b.covariance)


def _check_same_size(other: ImageSet, samples: ImageSet) -> None:
    if other.shape != samples.shape:
        raise UserError(
            f"{other.name} has images of {other.shape}, the samples {samples.shape} (height, "
            "width, channels); give a reference of the samples' size"
        )


def _read(file: Path) -> np.ndarray:
    try:
        return np.asarray(read_rgb(file))
    except BadImage as error:
        raise UserError(str(error)) from None
