"""The metrics of one set of samples."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sit_vit5.config import MetricsConfig
from sit_vit5.distributed import Processes, alone
from sit_vit5.errors import UserError, choose
from sit_vit5.evaluation.agreement import check_labels, digits_agreement
from sit_vit5.evaluation.compared import (
    Source,
    choose_metrics,
    describe_source,
    few_notes,
    find_source,
)
from sit_vit5.evaluation.environment import device_name, versions
from sit_vit5.evaluation.feature_cache import DEFAULT_FOLDER, FeatureCache
from sit_vit5.evaluation.feature_pass import Pass, identity_of
from sit_vit5.evaluation.inputs import (
    Manifest,
    check_same_size,
    hash_of,
    open_image_set,
    read_manifest,
)
from sit_vit5.evaluation.mistakes import Evidence, Finding, find_mistakes
from sit_vit5.evaluation.observing import Observations, Observing
from sit_vit5.evaluation.selftest import self_test_of
from sit_vit5.metrics.extractors import POOL, Extractor, build_extractor
from sit_vit5.metrics.frechet import self_test
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described, Metric
from sit_vit5.metrics.registry import METRICS
from sit_vit5.metrics.uncertainty import bootstrap_frechet_distance, extrapolated_frechet_distance
from sit_vit5.progress import progress_bar

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
    def extractor(self) -> Extractor:
        """The extractor of its features and of the samples'."""
        return self.features.extractor

    @property
    def sha256(self) -> str | None:
        """Hash of its file, None for folders and built-in sets."""
        return self.source.sha256


def open_reference(
    options: MetricsConfig, samples: ImageSet, processes: Processes | None = None
) -> Reference:
    """The reference that the options name, for sets of images of the samples' size."""
    self_test()
    for name in options.metrics:
        choose("metric", name, METRICS)  # before the seconds that a network takes
    seconds: dict[str, float] = {}
    with timed(seconds, "extractor"):
        extractor = build_extractor(options.features, options.weights or options.inception_weights)
    with timed(seconds, "reference"):
        features = Pass(
            Observing(extractor), options.batch_size, _cache(options), processes or alone()
        )
        source = find_source(options.reference, extractor.identity, samples)
        metrics, notes = choose_metrics(options.metrics, extractor.outputs, source)
        described = describe_source(source, metrics, features)
    notes = few_notes(described, source.count or 0, "reference images") + source.notes + notes
    return Reference(features, source, metrics, described, notes, seconds)


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
    samples = open_image_set(options.samples)
    samples_hash = hash_of(options.samples)
    manifest = read_manifest(options.samples, samples_hash)
    if options.agreement:
        check_labels(options.agreement, samples, manifest)
    floor = open_image_set(options.floor) if options.floor else None
    if floor:
        check_same_size(floor, samples)
    reference = reference or open_reference(options, samples, processes)
    metrics, few = _enough(reference.metrics, samples.count, asked=bool(options.metrics))
    run = _Run(options, reference, metrics, dict(reference.seconds))
    with timed(run.seconds, "samples"):
        found = run.describe(samples, samples_hash, "samples")
    if floor:
        with timed(run.seconds, "floor"):
            of_floor = run.describe(floor, hash_of(options.floor), "floor")
    if not reference.features.processes.is_main:
        return {}
    result = _facts(options, reference, samples, samples_hash) | run.values(found)
    if floor:
        values = _Run(options, reference, metrics, {}).values(of_floor)
        result["floor"] = {"samples": options.floor, "count": floor.count, **values}
    if options.bootstrap or options.extrapolate:
        result["uncertainty"] = run.uncertainty(found)
    if options.selftest:
        result["selftest"] = self_test_of(reference.described, metrics, reference.extractor)
    if options.agreement:
        result["agreement"] = digits_agreement(samples, manifest)
    mistakes = _mistakes(options, reference, samples, found, manifest, sha256=samples_hash)
    notes = reference.notes + few + few_notes(found, samples.count, "samples")
    return result | {
        "warnings": [finding.text for finding in mistakes if finding.level == "warning"],
        "notes": notes
        + [finding.text for finding in mistakes if finding.level == "note"]
        + tool_notes(reference.extractor),
        "seconds": {stage: round(taken, 3) for stage, taken in run.seconds.items()},
        "device": device_name(),
        "versions": versions(),
        "manifest": manifest.facts if manifest else None,
    }


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
        if "fid" in self.metrics and (self.options.bootstrap or self.options.extrapolate):
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

    def uncertainty(self, found: Described) -> dict[str, dict]:
        """How far the Frechet distance can be trusted, as the options ask."""
        if "fid" not in self.metrics or POOL not in found.rows:
            raise UserError("bootstrap and extrapolate are of fid; add it to --metrics")
        sets = {
            "samples": found.rows[POOL],
            "reference": self.reference.described.statistics[POOL],
        }
        result = {}
        if self.options.bootstrap:
            with (
                timed(self.seconds, "bootstrap"),
                progress_bar(self.options.bootstrap, unit="resample", title="bootstrap") as bar,
            ):
                interval = bootstrap_frechet_distance(
                    **sets, resamples=self.options.bootstrap, each=bar.update
                )
            result["interval"] = asdict(interval)
        if self.options.extrapolate:
            with timed(self.seconds, "extrapolate"):
                result["extrapolation"] = asdict(extrapolated_frechet_distance(**sets))
        return result


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Notes what the block took."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _enough(
    metrics: Mapping[str, Metric], count: int, *, asked: bool
) -> tuple[dict[str, Metric], list[str]]:
    """The metrics that so few samples allow (E4); refuses one that was asked for by name."""
    lacking = {name: metric for name, metric in metrics.items() if count < metric.fewest}
    notes = [
        f"{name} left out: it needs {metric.fewest} images, the samples are {count}"
        for name, metric in lacking.items()
    ]
    if lacking and (asked or len(lacking) == len(metrics)):
        raise UserError("; ".join(notes).replace(" left out:", ":"))
    return {name: metric for name, metric in metrics.items() if name not in lacking}, notes


def _facts(
    options: MetricsConfig, reference: Reference, samples: ImageSet, samples_hash: str | None
) -> dict:
    return {
        "command": shlex.join(sys.argv),
        "samples": options.samples,
        "samples_sha256": samples_hash,
        "samples_formats": samples.formats,
        "count": samples.count,
        "reference": options.reference,
        "reference_sha256": reference.sha256,
        "reference_count": reference.source.count,
        "extractor": reference.extractor.identity,
    }


def _mistakes(
    options: MetricsConfig,
    reference: Reference,
    samples: ImageSet,
    found: Described,
    manifest: Manifest | None,
    *,
    sha256: str | None,
) -> list[Finding]:
    """What is likely to be wrong with this comparison. sha256: of the samples."""
    evidence = Evidence(
        samples=samples,
        samples_path=options.samples,
        reference_path=options.reference,
        features=options.features,
        samples_sha256=sha256,
        reference_sha256=reference.sha256,
        manifest=manifest,
        reference=reference.source.file,
        reference_images=reference.source.images,
        seen=Observations.of(found.rows),
        reference_seen=Observations.of(reference.described.rows),
    )
    return find_mistakes(evidence)


def tool_notes(extractor: Extractor) -> list[str]:
    """With what else the values may be compared (E32)."""
    if extractor.identity["features"] != "inception":
        return []
    return [
        "ADM's protocol with torch-fidelity's InceptionV3: not comparable with values of "
        "pytorch-fid or clean-fid, which resize otherwise"
    ]


def _cache(options: MetricsConfig) -> FeatureCache | None:
    """Features of networks are kept; pixels are faster made than read."""
    if not options.keep_features or options.features == "pixels":
        return None
    folder = Path(options.cache or DEFAULT_FOLDER).expanduser()
    return FeatureCache(folder, int(options.cache_gigabytes * GIGABYTE))
