"""The metrics of one set of samples."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from sit_vit5.config import MetricsConfig
from sit_vit5.distributed import Processes
from sit_vit5.evaluation.agreement import digits_agreement
from sit_vit5.evaluation.compared import enough, few_notes
from sit_vit5.evaluation.environment import device_name, versions
from sit_vit5.evaluation.inputs import Manifest
from sit_vit5.evaluation.mistakes import Evidence, Finding, find_mistakes
from sit_vit5.evaluation.neighbours import neighbour_findings
from sit_vit5.evaluation.observing import Observations
from sit_vit5.evaluation.opened import Inputs, open_inputs
from sit_vit5.evaluation.protocol import protocol_notes
from sit_vit5.evaluation.real_sets import LoadedSet, RealSet
from sit_vit5.evaluation.reference import Reference, open_reference
from sit_vit5.evaluation.stages import Run, check_uncertainty, timed
from sit_vit5.metrics.extractors import Extractor
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described


@dataclass(frozen=True)
class Evaluation:
    """result: JSON values, empty on other processes than the main one.

    The images that its numbers mean: samples; classes: the labelled real ones; training: those
    among which neighbours were sought.
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
    """`evaluate`, with the images that a page shows."""
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
    found: Described,
    few: list[str],
    near: dict,
    classes: RealSet | None,
) -> dict[str, list[str]]:
    """Warnings and notes: what is likely to be wrong, and what a reader must know."""
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
    """What training's loader says of the data sets that it opened, such as files passed over."""
    loaded = [real.images for real in (inputs.classes, inputs.neighbours) if real]
    return [
        f"{images.name}: {note.removeprefix('note: ')}"
        for images in loaded
        if isinstance(images, LoadedSet)
        for note in images.source.notes
    ]


def tool_notes(extractor: Extractor) -> list[str]:
    """With what else the values may be compared (E32)."""
    if extractor.identity["features"] != "inception":
        return []
    return [
        "ADM's protocol with torch-fidelity's InceptionV3: not comparable with values of "
        "pytorch-fid or clean-fid, which resize otherwise"
    ]
