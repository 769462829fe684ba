"""A reference opened for any number of sets of samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sit_vit5.config import MetricsConfig
from sit_vit5.distributed import Processes, alone
from sit_vit5.errors import choose
from sit_vit5.evaluation.compared import (
    Source,
    check_stored_widths,
    choose_metrics,
    describe_source,
    few_notes,
    find_source,
)
from sit_vit5.evaluation.feature_cache import DEFAULT_FOLDER, FeatureCache
from sit_vit5.evaluation.feature_pass import Pass
from sit_vit5.evaluation.observing import Observing
from sit_vit5.metrics.extractors import build_extractor
from sit_vit5.metrics.frechet import self_test
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described, Metric
from sit_vit5.metrics.registry import METRICS

GIGABYTE = 10**9


@dataclass(frozen=True)
class Reference:
    """What samples are compared with, for any number of sample sets.

    metrics: those it allows; seconds: what opening it took, by stage.
    """

    features: Pass
    source: Source
    metrics: Mapping[str, Metric]
    described: Described
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
    """Notes what the block took."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _cache(options: MetricsConfig) -> FeatureCache | None:
    """Features of networks are kept; pixels are faster made than read."""
    if not options.keep_features or options.features == "pixels":
        return None
    folder = Path(options.cache or DEFAULT_FOLDER).expanduser()
    return FeatureCache(folder, int(options.cache_gigabytes * GIGABYTE))
