"""Evaluation of a sample set: its inputs are opened and checked before any long computation."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from tqdm import tqdm

from sit_vit5.config import MetricsConfig, RealDataConfig
from sit_vit5.evaluation.checks import Evidence, Finding, find_mistakes
from sit_vit5.evaluation.compare import Reference, enough, few_notes, open_reference, timed
from sit_vit5.evaluation.features import MOST_ROWS, identity_of
from sit_vit5.evaluation.inputs import (
    Manifest,
    check_same_size,
    device_name,
    hash_of,
    open_image_set,
    read_manifest,
    versions,
)
from sit_vit5.evaluation.neighbours import find_neighbours, neighbour_findings
from sit_vit5.evaluation.observations import Observations
from sit_vit5.evaluation.per_class import (
    check_labels,
    choose_real,
    compare_classes,
    describe_real,
    digits_agreement,
    obstacle,
)
from sit_vit5.evaluation.protocol import protocol_notes
from sit_vit5.evaluation.real_sets import (
    LoadedSet,
    RealSet,
    check_matching,
    labelled_reference,
    open_real,
)
from sit_vit5.metrics.features import POOL, Extractor
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import FeatureSet, Metric
from sit_vit5.metrics.uncertainty import (
    POINTS,
    bootstrap_frechet_distance,
    extrapolated_frechet_distance,
)
from sit_vit5.utils.distributed import Processes
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.progress import progress_bar


@dataclass(frozen=True)
class Inputs:
    """Opened inputs beside the reference; real sets only if requested."""

    samples: ImageSet
    sha256: str | None
    manifest: Manifest | None
    floor: ImageSet | None
    classes: RealSet | None
    neighbours: RealSet | None


def open_inputs(options: MetricsConfig) -> Inputs:
    """Open and check the inputs before any long computation."""
    samples = open_image_set(options.samples)
    sha256 = hash_of(options.samples)
    manifest = read_manifest(options.samples, sha256)
    if options.agreement:
        check_labels(options.agreement, samples, manifest)
    floor = open_image_set(options.floor) if options.floor else None
    if floor:
        check_same_size(floor, samples)
    if options.neighbours and samples.count > MOST_ROWS:
        raise UserError(f"neighbours are of at most {MOST_ROWS:,} samples, found {samples.count:,}")
    classes = None
    if options.classes:
        if reason := obstacle(manifest, samples.count):
            raise UserError(f"classes {options.classes} has no use: {reason}")
        real = open_real(options.classes, options.real, samples, labelled=True)
        classes = choose_real(real, manifest, options.seed)
    neighbours = None
    if options.neighbours:
        neighbours = open_real(options.neighbours, options.real, samples, labelled=False)
    loaded = [isinstance(real.images, LoadedSet) for real in (classes, neighbours) if real]
    if options.real != RealDataConfig() and not any(loaded):
        raise UserError(
            "options --real. have no use: neither classes nor neighbours are a data set that "
            "training's loader reads; drop them"
        )
    return Inputs(samples, sha256, manifest, floor, classes, neighbours)


@dataclass(frozen=True)
class Run:
    """Metrics of image sets against one reference. seconds: per stage, filled during the run."""

    options: MetricsConfig
    reference: Reference
    metrics: Mapping[str, Metric]
    seconds: dict[str, float] = field(default_factory=dict)

    def describe(self, images: ImageSet, sha256: str | None, title: str) -> FeatureSet:
        """Return features and statistics of images, from one pass."""
        needs, options = self.metrics.values(), self.options
        rows = [metric.output for metric in needs if metric.samples == "rows"]
        if options.bootstrap or options.extrapolate or options.classes or options.neighbours:
            rows.append(POOL)
        return self.reference.features.describe(
            images,
            rows=rows,
            statistics=[metric.output for metric in needs if metric.samples == "statistics"],
            identity=identity_of(images, sha256),
            title=title,
        )

    def values(self, found: FeatureSet) -> dict[str, float | None]:
        """Return the values of all metrics."""
        values: dict[str, float | None] = {}
        for name, metric in self.metrics.items():
            with timed(self.seconds, name):
                values |= metric.function(found, self.reference.described)
        return values

    def floor(self, images: ImageSet | None) -> dict:
        """Baseline of a perfect model: the metrics of a second real set, if given."""
        if images is None:
            return {}
        with timed(self.seconds, "floor"):
            found = self.describe(images, hash_of(self.options.floor), "floor")
        if not self._is_main:
            return {}
        values = replace(self, seconds={}).values(found)
        return {"floor": {"samples": self.options.floor, "count": images.count, **values}}

    def classes(self, inputs: Inputs, found: FeatureSet) -> tuple[RealSet | None, dict]:
        """Return the labelled real images and the distances of the samples' classes to theirs."""
        if reason := obstacle(inputs.manifest, inputs.samples.count):
            return None, {"classes": {"left_out": reason}}
        real, described = inputs.classes, self.reference.described
        with timed(self.seconds, "classes"):
            if real:
                described = describe_real(real, self.reference.features)
            else:
                real = labelled_reference(self.reference.source)
                if real:
                    real = replace(real, matching=check_matching(real, inputs.manifest))
            if not self._is_main:
                return None, {}
            return real, {"classes": compare_classes(found, inputs.manifest, real, described)}

    def neighbours(self, inputs: Inputs, found: FeatureSet) -> dict:
        """Nearest training images of random samples, if training images are given."""
        if not inputs.neighbours:
            return {}
        training, features = inputs.neighbours.images, self.reference.features
        with timed(self.seconds, "neighbours"):
            return {"neighbours": find_neighbours(found, training, features, self.options.seed)}

    def extras(self, found: FeatureSet) -> dict[str, dict]:
        """Uncertainty and self-test, if requested."""
        extras = {}
        if self.options.bootstrap or self.options.extrapolate:
            extras["uncertainty"] = self._uncertainty(found)
        if self.options.selftest:
            reference = self.reference
            extras["selftest"] = self_test_of(
                reference.described, self.metrics, reference.extractor.extractor
            )
        return extras

    def _uncertainty(self, found: FeatureSet) -> dict[str, dict]:
        """Bootstrap interval and extrapolation of the Frechet distance, as requested."""
        sets = {
            "samples": found.rows[POOL],
            "reference": self.reference.described.statistics[POOL],
        }
        result = {}
        if resamples := self.options.bootstrap:
            with self._stage("bootstrap", resamples) as bar:
                found = bootstrap_frechet_distance(**sets, resamples=resamples, each=bar.update)
            result["interval"] = asdict(found)
        if self.options.extrapolate:
            with self._stage("extrapolate", POINTS) as bar:
                found = extrapolated_frechet_distance(**sets, each=bar.update)
            result["extrapolation"] = asdict(found)
        return result

    @contextmanager
    def _stage(self, name: str, distances: int) -> Iterator[tqdm]:
        """Timed stage with a progress bar over its number of distances."""
        with timed(self.seconds, name), progress_bar(distances, unit="distance", title=name) as bar:
            yield bar

    @property
    def _is_main(self) -> bool:
        return self.reference.features.processes.is_main


def check_uncertainty(metrics: Mapping[str, Metric], count: int) -> None:
    """Refuse, before the long computation, sets without a bootstrap interval or extrapolation."""
    if "fid" not in metrics:
        raise UserError("bootstrap and extrapolate are of fid; add it to --metrics")
    if not 2 * POINTS <= count <= MOST_ROWS:
        raise UserError(
            f"bootstrap and extrapolate take {2 * POINTS} to {MOST_ROWS:,} samples, found {count:,}"
        )


# Difference of an image's features alone and in a batch, relative to the largest: fp32 rounding.
BATCH_TOLERANCE = 1e-4
# Result -> its value for a set against itself, and the tolerance. A kernel distance that skips
# equal pairs is slightly below 0; an Inception Score has no known value.
EXPECTED = {
    "frechet_distance": (0.0, 1e-6),
    "spatial_frechet_distance": (0.0, 1e-6),
    "precision": (1.0, 0.0),
    "recall": (1.0, 0.0),
}
SIDE = 32


def self_test_of(
    reference: FeatureSet, metrics: Mapping[str, Metric], extractor: Extractor
) -> dict[str, float]:
    """Return the errors by result; UserError if one exceeds its tolerance."""
    errors = {"features of an image alone and among others": _batch_error(extractor)}
    limits = dict.fromkeys(errors, BATCH_TOLERANCE)
    for metric in metrics.values():
        if not EXPECTED.keys() & metric.names or not reference.has(metric.samples, metric.output):
            continue
        found = metric.function(reference, reference)
        for key in (key for key in found if key in EXPECTED):
            value, tolerance = EXPECTED[key]
            scale = _scale(reference, metric) if metric.reference == "statistics" else 1.0
            errors[key], limits[key] = abs(found[key] - value), tolerance * scale
    wrong = [f"{what}: error {errors[what]:.3g}" for what in errors if errors[what] > limits[what]]
    if wrong:
        raise UserError(
            f"self-test failed ({'; '.join(wrong)}); the installation's linear algebra or network "
            "is wrong, try another machine or reinstall numpy, scipy and torch"
        )
    return errors


def _scale(reference: FeatureSet, metric: Metric) -> float:
    """Scale of a distance's rounding error: the total variance, at least 1."""
    return max(1.0, float(np.trace(reference.statistics[metric.output].covariance)))


def _batch_error(extractor: Extractor) -> float:
    """Largest relative difference between an image's features alone and in a batch of three."""
    images = np.random.Generator(np.random.Philox(key=3)).integers(
        0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8
    )
    together, alone = extractor(images), extractor(images[1:2])
    return max(
        float(np.abs(together[output][1] - alone[output][0]).max() / np.abs(together[output]).max())
        for output in together
    )


@dataclass(frozen=True)
class Evaluation:
    """result: JSON values, empty on other processes than the main one.

    The images behind its numbers: samples; classes: labelled real images; training: images
    searched for neighbours.
    """

    result: dict
    samples: ImageSet
    manifest: Manifest | None = None
    classes: RealSet | None = None
    training: ImageSet | None = None


def evaluate(
    options: MetricsConfig,
    *,
    reference: Reference | None = None,
    processes: Processes | None = None,
) -> dict:
    """Return all metrics of one sample set as JSON values, with the facts needed to trust them.

    reference: an opened one, to share it among several sets. Only the main process returns the
    result; the others help with the features and return an empty one.
    """
    return examine(options, reference=reference, processes=processes).result


def examine(
    options: MetricsConfig,
    *,
    reference: Reference | None = None,
    processes: Processes | None = None,
) -> Evaluation:
    """Evaluate as `evaluate`, and return the images that a page shows too."""
    inputs = open_inputs(options)
    samples, manifest = inputs.samples, inputs.manifest
    reference = reference or open_reference(options, samples, processes)
    metrics, few = enough(reference.metrics, samples.count, asked=bool(options.metrics))
    if inputs.floor:
        enough(metrics, inputs.floor.count, asked=True, what=f"those of the floor {options.floor}")
    if options.bootstrap or options.extrapolate:
        check_uncertainty(metrics, samples.count)
    run = Run(options, reference, metrics, dict(reference.seconds))
    with timed(run.seconds, "samples"):
        found = run.describe(samples, inputs.sha256, "samples")
    floor = run.floor(inputs.floor)
    classes, by_class = run.classes(inputs, found)
    near = run.neighbours(inputs, found)
    if not reference.features.processes.is_main:
        return Evaluation({}, samples)
    result = _facts(options, reference, inputs) | run.values(found) | floor | run.extras(found)
    if options.agreement:
        result["agreement"] = digits_agreement(samples, manifest)
    result |= by_class | near | _remarks(options, reference, inputs, found, few, near, classes)
    result |= {
        "seconds": {stage: round(taken, 3) for stage, taken in run.seconds.items()},
        "device": device_name(),
        "versions": versions(),
        "manifest": manifest.facts if manifest else None,
    }
    result["notes"] += protocol_notes(result)
    training = inputs.neighbours.images if inputs.neighbours else None
    return Evaluation(result, samples, manifest, classes, training)


def _facts(options: MetricsConfig, reference: Reference, inputs: Inputs) -> dict:
    return {
        "command": shlex.join(sys.argv),
        "samples": options.samples,
        "samples_sha256": inputs.sha256,
        "samples_formats": inputs.samples.formats,
        "samples_passed_over": inputs.samples.passed_over,
        "count": inputs.samples.count,
        "image_shape": list(inputs.samples.shape),
        "reference": options.reference,
        "reference_sha256": reference.sha256,
        "reference_count": reference.source.count,
        "extractor": reference.extractor.identity,
    }


def _remarks(
    options: MetricsConfig,
    reference: Reference,
    inputs: Inputs,
    found: FeatureSet,
    few: list[str],
    near: dict,
    classes: RealSet | None,
) -> dict[str, list[str]]:
    """Warnings on likely mistakes, and notes for the reader."""
    mistakes = find_mistakes(
        Evidence(
            samples=inputs.samples,
            samples_path=options.samples,
            reference_path=options.reference,
            features=options.features,
            samples_sha256=inputs.sha256,
            reference_sha256=reference.sha256,
            manifest=inputs.manifest,
            reference=reference.source.file,
            reference_images=reference.source.images,
            seen=Observations.of(found.rows),
            reference_seen=Observations.of(reference.described.rows),
        )
    )
    if near:
        mistakes += neighbour_findings(near["neighbours"])
    if classes:
        matching = classes.matching
        remarks = (("warning", matching.warning), ("note", matching.note))
        mistakes += [Finding(level, text) for level, text in remarks if text]
    notes = (
        reference.notes
        + few
        + _loader_notes(inputs)
        + few_notes(found, inputs.samples.count, "samples")
    )
    notes += [finding.text for finding in mistakes if finding.level == "note"]
    return {
        "warnings": [finding.text for finding in mistakes if finding.level == "warning"],
        "notes": notes + tool_notes(reference.extractor),
    }


def _loader_notes(inputs: Inputs) -> list[str]:
    """Notes of the training loader on the data sets that it opened, such as skipped files."""
    loaded = [real.images for real in (inputs.classes, inputs.neighbours) if real]
    return [
        f"{images.name}: {note.removeprefix('note: ')}"
        for images in loaded
        if isinstance(images, LoadedSet)
        for note in images.source.notes
    ]


def tool_notes(extractor: Extractor) -> list[str]:
    """Notes on the tools whose values are comparable."""
    if extractor.identity["features"] != "inception":
        return []
    return [
        "ADM's protocol with torch-fidelity's InceptionV3: not comparable with values of "
        "pytorch-fid or clean-fid, which resize otherwise"
    ]
