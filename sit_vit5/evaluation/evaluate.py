"""The metrics of one set of samples."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from tqdm import tqdm

from sit_vit5.config import MetricsConfig
from sit_vit5.distributed import Processes
from sit_vit5.errors import UserError
from sit_vit5.evaluation.agreement import check_labels, digits_agreement
from sit_vit5.evaluation.compared import few_notes, lacking_images
from sit_vit5.evaluation.environment import device_name, versions
from sit_vit5.evaluation.feature_pass import MOST_ROWS, identity_of
from sit_vit5.evaluation.inputs import (
    Manifest,
    check_same_size,
    hash_of,
    open_image_set,
    read_manifest,
)
from sit_vit5.evaluation.mistakes import Evidence, find_mistakes
from sit_vit5.evaluation.observing import Observations
from sit_vit5.evaluation.reference import Reference, open_reference, timed
from sit_vit5.evaluation.selftest import self_test_of
from sit_vit5.metrics.extractors import POOL, Extractor
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described, Metric
from sit_vit5.metrics.uncertainty import (
    POINTS,
    bootstrap_frechet_distance,
    extrapolated_frechet_distance,
)
from sit_vit5.progress import progress_bar


def evaluate(
    options: MetricsConfig,
    *,
    reference: Reference | None = None,
    processes: Processes | None = None,
) -> dict:
    """All metrics of one set of samples, as JSON values, with what is needed to trust them.

    reference: the opened one, if it serves several sets. Only the main process has the result, the
    others help with the features and get an empty one.
    """
    samples = _open_samples(options)
    floor = open_image_set(options.floor) if options.floor else None
    if floor:
        check_same_size(floor, samples.images)
    reference = reference or open_reference(options, samples.images, processes)
    metrics, few = _enough(reference.metrics, samples.images.count, asked=bool(options.metrics))
    if floor:
        _enough(metrics, floor.count, asked=True, what=f"those of the floor {options.floor}")
    if options.bootstrap or options.extrapolate:
        _check_uncertainty(metrics, samples.images.count)
    run = _Run(options, reference, metrics, dict(reference.seconds))
    with timed(run.seconds, "samples"):
        found = run.describe(samples.images, samples.sha256, "samples")
    if floor:
        with timed(run.seconds, "floor"):
            of_floor = run.describe(floor, hash_of(options.floor), "floor")
    if not reference.features.processes.is_main:
        return {}
    result = _facts(options, reference, samples) | run.values(found)
    if floor:
        values = _Run(options, reference, metrics).values(of_floor)
        result["floor"] = {"samples": options.floor, "count": floor.count, **values}
    result |= run.extras(found)
    if options.agreement:
        result["agreement"] = digits_agreement(samples.images, samples.manifest)
    return (
        result
        | _remarks(options, reference, samples, found, few)
        | {
            "seconds": {stage: round(taken, 3) for stage, taken in run.seconds.items()},
            "device": device_name(),
            "versions": versions(),
            "manifest": samples.manifest.facts if samples.manifest else None,
        }
    )


@dataclass(frozen=True)
class _Samples:
    """What is evaluated. sha256: of its file, None for folders and built-in sets."""

    images: ImageSet
    sha256: str | None
    manifest: Manifest | None


def _open_samples(options: MetricsConfig) -> _Samples:
    images, sha256 = open_image_set(options.samples), hash_of(options.samples)
    manifest = read_manifest(options.samples, sha256)
    if options.agreement:
        check_labels(options.agreement, images, manifest)
    return _Samples(images, sha256, manifest)


@dataclass(frozen=True)
class _Run:
    """The metrics of sets of images against one reference; seconds: by stage, filled on the way."""

    options: MetricsConfig
    reference: Reference
    metrics: Mapping[str, Metric]
    seconds: dict[str, float] = field(default_factory=dict)

    def describe(self, images: ImageSet, sha256: str | None, title: str) -> Described:
        """Features and statistics of images, all in one pass."""
        needs = self.metrics.values()
        rows = [metric.output for metric in needs if metric.samples == "rows"]
        if self.options.bootstrap or self.options.extrapolate:
            rows.append(POOL)
        return self.reference.features.describe(
            images,
            rows=rows,
            statistics=[metric.output for metric in needs if metric.samples == "statistics"],
            identity=identity_of(images, sha256),
            title=title,
        )

    def values(self, found: Described) -> dict[str, float | None]:
        """Every metric's numbers."""
        values: dict[str, float | None] = {}
        for name, metric in self.metrics.items():
            with timed(self.seconds, name):
                values |= metric.function(found, self.reference.described)
        return values

    def extras(self, found: Described) -> dict[str, dict]:
        """What the options ask for besides the metrics."""
        extras = {}
        if self.options.bootstrap or self.options.extrapolate:
            extras["uncertainty"] = self._uncertainty(found)
        if self.options.selftest:
            reference = self.reference
            extras["selftest"] = self_test_of(
                reference.described, self.metrics, reference.extractor
            )
        return extras

    def _uncertainty(self, found: Described) -> dict[str, dict]:
        """How far the Frechet distance can be trusted, as the options ask."""
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
        """A timed stage of so many distances, with its progress bar."""
        with timed(self.seconds, name), progress_bar(distances, unit="distance", title=name) as bar:
            yield bar


def _enough(
    metrics: Mapping[str, Metric], count: int, *, asked: bool, what: str = "the samples"
) -> tuple[dict[str, Metric], list[str]]:
    """The metrics that so many samples allow; refuses one that was asked for by name."""
    reasons = {name: lacking_images(metric, count, what) for name, metric in metrics.items()}
    lacking = {name: reason for name, reason in reasons.items() if reason}
    notes = [f"{name} left out: it {reason}" for name, reason in lacking.items()]
    if lacking and (asked or len(lacking) == len(metrics)):
        raise UserError("; ".join(notes).replace(" left out:", ":"))
    return {name: metric for name, metric in metrics.items() if name not in lacking}, notes


def _check_uncertainty(metrics: Mapping[str, Metric], count: int) -> None:
    """Refuses, before the long part, what cannot have an interval or a limit."""
    if "fid" not in metrics:
        raise UserError("bootstrap and extrapolate are of fid; add it to --metrics")
    if not 2 * POINTS <= count <= MOST_ROWS:
        raise UserError(
            f"bootstrap and extrapolate take {2 * POINTS} to {MOST_ROWS:,} samples, found {count:,}"
        )


def _facts(options: MetricsConfig, reference: Reference, samples: _Samples) -> dict:
    return {
        "command": shlex.join(sys.argv),
        "samples": options.samples,
        "samples_sha256": samples.sha256,
        "samples_formats": samples.images.formats,
        "count": samples.images.count,
        "reference": options.reference,
        "reference_sha256": reference.sha256,
        "reference_count": reference.source.count,
        "extractor": reference.extractor.identity,
    }


def _remarks(
    options: MetricsConfig,
    reference: Reference,
    samples: _Samples,
    found: Described,
    few: list[str],
) -> dict[str, list[str]]:
    """Warnings and notes: what is likely to be wrong, and what a reader must know."""
    mistakes = find_mistakes(
        Evidence(
            samples=samples.images,
            samples_path=options.samples,
            reference_path=options.reference,
            features=options.features,
            samples_sha256=samples.sha256,
            reference_sha256=reference.sha256,
            manifest=samples.manifest,
            reference=reference.source.file,
            reference_images=reference.source.images,
            seen=Observations.of(found.rows),
            reference_seen=Observations.of(reference.described.rows),
        )
    )
    notes = reference.notes + few + few_notes(found, samples.images.count, "samples")
    notes += [finding.text for finding in mistakes if finding.level == "note"]
    return {
        "warnings": [finding.text for finding in mistakes if finding.level == "warning"],
        "notes": notes + tool_notes(reference.extractor),
    }


def tool_notes(extractor: Extractor) -> list[str]:
    """With what else the values may be compared (E32)."""
    if extractor.identity["features"] != "inception":
        return []
    return [
        "ADM's protocol with torch-fidelity's InceptionV3: not comparable with values of "
        "pytorch-fid or clean-fid, which resize otherwise"
    ]
