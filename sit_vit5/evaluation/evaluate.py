"""The metrics of one set of samples."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sit_vit5.config import MetricsConfig
from sit_vit5.distributed import Processes, alone
from sit_vit5.errors import choose
from sit_vit5.evaluation.agreement import digits_agreement
from sit_vit5.evaluation.compared import (
    Source,
    choose_metrics,
    describe_source,
    enough,
    few_notes,
    find_source,
)
from sit_vit5.evaluation.environment import device_name, versions
from sit_vit5.evaluation.feature_cache import DEFAULT_FOLDER, FeatureCache
from sit_vit5.evaluation.feature_pass import Pass
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.mistakes import Evidence, Finding, find_mistakes
from sit_vit5.evaluation.neighbours import neighbour_findings
from sit_vit5.evaluation.observing import Observations, Observing
from sit_vit5.evaluation.opened import Inputs, open_inputs
from sit_vit5.evaluation.real_sets import RealSet
from sit_vit5.evaluation.selftest import self_test_of
from sit_vit5.evaluation.stages import Run, timed
from sit_vit5.metrics.extractors import Extractor, build_extractor
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
    def extractor(self) -> Extractor:
        """The extractor of its features and of the samples'."""
        return self.features.extractor

    def run(self, options: MetricsConfig, metrics: Mapping[str, Metric]) -> Run:
        """A comparison with it."""
        return Run(options, metrics, self.features, self.source, self.described, dict(self.seconds))

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


@dataclass(frozen=True)
class Evaluation:
    """result: JSON values, empty on other processes; the images that its numbers mean: classes:
    labelled real ones, training: those among which neighbours were sought."""

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
    """All metrics of one set of samples, as JSON values, with what is needed to trust them.

    reference: the opened one, if it serves several sets. Only the main process has the result, the
    others help with the features and get an empty one.
    """
    return examine(options, reference=reference, processes=processes).result


def examine(
    options: MetricsConfig,
    *,
    reference: Reference | None = None,
    processes: Processes | None = None,
) -> Evaluation:
    """`evaluate`, with the images that a report shows."""
    inputs = open_inputs(options)
    samples = inputs.samples
    reference = reference or open_reference(options, samples, processes)
    metrics, few = enough(reference.metrics, samples.count, asked=bool(options.metrics))
    run = reference.run(options, metrics)
    with timed(run.seconds, "samples"):
        found = run.describe(samples, inputs.sha256, "samples")
    of_floor = run.floor(inputs.floor)
    classes, by_class = run.classes(inputs, found)
    near = run.neighbours(inputs, found)
    if not reference.features.processes.is_main:
        return Evaluation({}, samples)
    result = _facts(options, reference, samples, inputs.sha256) | run.values(found)
    result |= of_floor | by_class | near
    if options.bootstrap or options.extrapolate:
        result["uncertainty"] = run.uncertainty(found)
    if options.selftest:
        result["selftest"] = self_test_of(reference.described, metrics, reference.extractor)
    if options.agreement:
        result["agreement"] = digits_agreement(samples, inputs.manifest)
    mistakes = _mistakes(options, reference, inputs, found)
    if near:
        mistakes += neighbour_findings(near["neighbours"])
    notes = reference.notes + few + few_notes(found, samples.count, "samples")
    result |= {
        "warnings": [finding.text for finding in mistakes if finding.level == "warning"],
        "notes": notes
        + [finding.text for finding in mistakes if finding.level == "note"]
        + tool_notes(reference.extractor),
        "seconds": {stage: round(taken, 3) for stage, taken in run.seconds.items()},
        "device": device_name(),
        "versions": versions(),
        "manifest": inputs.manifest.facts if inputs.manifest else None,
    }
    training = inputs.neighbours.images if inputs.neighbours else None
    return Evaluation(result, samples, inputs.manifest, classes, training)


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
    options: MetricsConfig, reference: Reference, inputs: Inputs, found: Described
) -> list[Finding]:
    """What is likely to be wrong with this comparison."""
    evidence = Evidence(
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
