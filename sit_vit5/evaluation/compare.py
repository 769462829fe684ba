"""Reference of an evaluation, and the metrics that it allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sit_vit5.config import MetricsConfig
from sit_vit5.evaluation.features import DEFAULT_FOLDER, MOST_ROWS, FeatureCache, Pass, identity_of
from sit_vit5.evaluation.inputs import (
    BUILT_IN,
    FILES,
    check_same_size,
    common_channels,
    hash_of,
    open_image_set,
)
from sit_vit5.evaluation.observations import Observing
from sit_vit5.metrics.features import POOL, SPATIAL, Extractor, build_extractor
from sit_vit5.metrics.fid import self_test
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import FeatureSet, Metric
from sit_vit5.metrics.reference import ReferenceFile, read_reference
from sit_vit5.metrics.registry import METRICS
from sit_vit5.metrics.statistics import Gaussian, Statistics, check_widths
from sit_vit5.utils.distributed import Processes, alone
from sit_vit5.utils.errors import UserError, choose

_MAKE = "give images, or a file by evaluate/reference.py make"


@dataclass(frozen=True)
class Source:
    """Content of a reference before any feature is computed.

    stored: statistics from its file by output; images: for rows, and for statistics if none are
    stored. file: where it is an npz. channels: in which its images and samples are compared.
    """

    name: str
    sha256: str | None
    stored: Mapping[str, Gaussian]
    images: ImageSet | None
    count: int | None
    channels: int
    notes: list[str] = field(default_factory=list)
    file: ReferenceFile | None = None

    @property
    def has_rows(self) -> bool:
        """True if features of single images are available."""
        return self.images is not None and self.images.count <= MOST_ROWS

    def has_statistics(self, output: str) -> bool:
        """True if mean and covariance of an output are available."""
        return output in self.stored or (not self.stored and self.images is not None)


def find_source(text: str, extractor: dict, samples: ImageSet) -> Source:
    """Open the reference for this extractor. Refuse images of another size than the samples'."""
    path = Path(text)
    if text not in BUILT_IN and path.is_file() and path.suffix.lower() not in FILES:
        return _of_file(path, extractor, samples)
    images = open_image_set(text)
    check_same_size(images, samples)
    channels = common_channels(samples, images)
    return Source(text, hash_of(text), {}, images, images.count, channels)


def _of_file(path: Path, extractor: dict, samples: ImageSet) -> Source:
    file = read_reference(path)
    file.check_size(samples.shape)
    if file.pool is None or file.has_statistics_of(extractor):
        file.check_covariances()
        pairs = ((POOL, file.pool), (SPATIAL, file.spatial))
        stored = {output: found for output, found in pairs if found is not None}
        count = file.count if stored else file.images.count
        channels = _stored_channels(file, samples)
        return Source(str(path), file.sha256, stored, file.images, count, channels, file=file)
    if file.images is None:
        file.check_extractor(extractor)
    note = (
        f"the statistics in {path} are of another extractor; its {file.images.count} images were "
        "used instead"
    )
    channels = common_channels(samples, file.images)
    return Source(
        str(path), file.sha256, {}, file.images, file.images.count, channels, [note], file
    )


def _stored_channels(file: ReferenceFile, samples: ImageSet) -> int:
    """Channels behind stored statistics. Refuse samples in colour for those of grey images."""
    if file.pool is None:
        return common_channels(samples, file.images)
    if file.image_shape is None:
        return samples.shape[2]
    channels = file.image_shape[2]
    if channels == 1 and not samples.is_grey():
        raise UserError(
            f"{file.path} is a reference of grey images, {samples.name} is in colour (3 channels); "
            "give a reference of images in colour"
        )
    return channels


def check_stored_widths(
    source: Source, metrics: Mapping[str, Metric], extractor: Extractor, shape: tuple[int, int, int]
) -> None:
    """Refuse stored statistics of another number of features, before the pass over the samples."""
    outputs = {metric.output for metric in metrics.values()} & source.stored.keys()
    if outputs:
        probe = extractor(np.zeros((1, *shape), np.uint8), tuple(outputs))
        for output in outputs:
            check_widths(probe[output].shape[1], len(source.stored[output].mean))


def choose_metrics(
    asked: Sequence[str], outputs: Sequence[str], source: Source
) -> tuple[dict[str, Metric], list[str]]:
    """The metrics to compute, and notes on those left out.

    asked: names, each of which must be possible; none for all that are.
    """
    chosen, notes = {}, []
    for name in asked or METRICS:
        metric = choose("metric", name, METRICS)
        reason = _lacking_output(metric, outputs) or _lacking_reference(metric, source)
        if not reason:
            chosen[name] = metric
        elif asked:
            raise UserError(f"metric {name} {reason}")
        elif metric.output in outputs:
            notes.append(f"{name} left out: it {reason}")
    if not chosen:
        raise UserError(f"{source.name} allows no metric of these features: {'; '.join(notes)}")
    return chosen, notes


def _lacking_images(metric: Metric, count: int, what: str) -> str | None:
    """Reason why this number of images does not allow a metric, or None. what: their name."""
    if count < metric.fewest:
        return f"needs {metric.fewest} images, {what} are {count}"
    if metric.samples == "rows" and count > MOST_ROWS:
        return f"takes at most {MOST_ROWS:,} images, {what} are {count:,}"
    return None


def _lacking_output(metric: Metric, outputs: Sequence[str]) -> str | None:
    if metric.output in outputs:
        return None
    return f"needs {metric.output} features; use the features inception"


def _lacking_reference(metric: Metric, source: Source) -> str | None:
    if metric.reference == "rows" and not source.has_rows:
        if source.images is not None:
            return f"takes at most {MOST_ROWS:,} reference images, {source.name} has more; " + _MAKE
        return f"needs reference images, and {source.name} holds statistics only; " + _MAKE
    if metric.reference == "rows" and source.images.count < metric.fewest:
        return f"needs {metric.fewest} reference images, {source.name} has {source.images.count}"
    if metric.reference == "statistics" and not source.has_statistics(metric.output):
        return (
            f"needs statistics of {metric.output} features, and {source.name} holds those of "
            f"{', '.join(source.stored)} only; " + _MAKE
        )
    return None


def describe_source(source: Source, metrics: Mapping[str, Metric], features: Pass) -> FeatureSet:
    """Rows and statistics of the reference that the metrics need; one pass at most."""
    needs = metrics.values()
    rows = [metric.output for metric in needs if metric.reference == "rows"]
    statistics = [metric.output for metric in needs if metric.reference == "statistics"]
    missing = [output for output in statistics if output not in source.stored]
    found = FeatureSet()
    if rows or missing:
        found = features.describe(
            source.images,
            rows=rows,
            statistics=missing,
            identity=identity_of(source.images, source.sha256),
            title="reference",
        )
    return FeatureSet(found.rows, {**source.stored, **found.statistics})


def few_notes(described: FeatureSet, count: int, what: str) -> list[str]:
    """Notes on a covariance without full rank, once for the widest features."""
    widths = [
        len(found.mean)
        for found in described.statistics.values()
        if isinstance(found, Statistics) and found.count <= len(found.mean)
    ]
    if not widths:
        return []
    return [
        f"{count} {what} for {max(widths)} features: the covariance is rank-deficient and "
        "the distance biased upwards; compare equal counts only"
    ]


def enough(
    metrics: Mapping[str, Metric], count: int, *, asked: bool, what: str = "the samples"
) -> tuple[dict[str, Metric], list[str]]:
    """Metrics that this number of samples allows; refuse a missing one requested by name."""
    reasons = {name: _lacking_images(metric, count, what) for name, metric in metrics.items()}
    lacking = {name: reason for name, reason in reasons.items() if reason}
    notes = [f"{name} left out: it {reason}" for name, reason in lacking.items()]
    if lacking and (asked or len(lacking) == len(metrics)):
        raise UserError("; ".join(notes).replace(" left out:", ":"))
    return {name: metric for name, metric in metrics.items() if name not in lacking}, notes


GIGABYTE = 10**9


@dataclass(frozen=True)
class Reference:
    """Opened reference, for any number of sample sets.

    metrics: those it allows; seconds: of opening it, by stage.
    """

    features: Pass
    source: Source
    metrics: Mapping[str, Metric]
    described: FeatureSet
    notes: list[str]
    seconds: dict[str, float]

    @property
    def extractor(self) -> Observing:
        """The extractor of its features and of the samples'."""
        return self.features.extractor

    @property
    def sha256(self) -> str | None:
        """Hash of its file, None for folders and built-in sets."""
        return self.source.sha256


def open_reference(
    options: MetricsConfig,
    samples: ImageSet,
    processes: Processes | None = None,
    *,
    weights_option: str = "--weights",
) -> Reference:
    """The reference that the options name, for sets of images of the samples' size.

    weights_option: the command's option for the file of the features' network, for errors.
    """
    self_test()
    for name in options.metrics:
        choose("metric", name, METRICS)  # before the seconds that a network takes
    seconds: dict[str, float] = {}
    with timed(seconds, "extractor"):
        weights = options.weights or options.inception_weights
        extractor = build_extractor(options.features, weights, option=weights_option)
    with timed(seconds, "reference"):
        source = find_source(options.reference, extractor.identity, samples)
        extractor = Observing(extractor, source.channels)
        features = Pass(extractor, options.batch_size, _cache(options), processes or alone())
        metrics, notes = choose_metrics(options.metrics, extractor.outputs, source)
        check_stored_widths(source, metrics, extractor, samples.shape)
        described = describe_source(source, metrics, features)
    notes = few_notes(described, source.count or 0, "reference images") + source.notes + notes
    return Reference(features, source, metrics, described, notes, seconds)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Record the seconds of the block."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _cache(options: MetricsConfig) -> FeatureCache | None:
    """Cache of network features; pixels are faster to compute than to read."""
    if not options.keep_features or options.features == "pixels":
        return None
    folder = Path(options.cache or DEFAULT_FOLDER).expanduser()
    return FeatureCache(folder, int(options.cache_gigabytes * GIGABYTE))
