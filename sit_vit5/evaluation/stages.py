"""The stages of a comparison: features, metrics, and what else was asked for, each timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from sit_vit5.config import MetricsConfig
from sit_vit5.errors import UserError
from sit_vit5.evaluation.classes import compare_classes, describe_real, obstacle
from sit_vit5.evaluation.compared import Source
from sit_vit5.evaluation.feature_pass import Pass, identity_of
from sit_vit5.evaluation.inputs import hash_of
from sit_vit5.evaluation.neighbours import find_neighbours
from sit_vit5.evaluation.opened import Inputs
from sit_vit5.evaluation.real_sets import RealSet, labelled_reference
from sit_vit5.metrics.extractors import POOL
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described, Metric
from sit_vit5.metrics.uncertainty import bootstrap_frechet_distance, extrapolated_frechet_distance
from sit_vit5.progress import progress_bar


@dataclass(frozen=True)
class Run:
    """One comparison, stage by stage.

    source, reference: what the samples are compared with, before and after its features; seconds:
    by stage, filled on the way.
    """

    options: MetricsConfig
    metrics: Mapping[str, Metric]
    features: Pass
    source: Source
    reference: Described
    seconds: dict[str, float] = field(default_factory=dict)

    def describe(self, images: ImageSet, sha256: str | None, title: str) -> Described:
        """Features and statistics of images, all in one pass."""
        needs = self.metrics.values()
        rows = [metric.output for metric in needs if metric.samples == "rows"]
        if self.options.neighbours or self.options.classes:
            rows.append(POOL)
        if "fid" in self.metrics and (self.options.bootstrap or self.options.extrapolate):
            rows.append(POOL)
        return self.features.describe(
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
                values |= metric.function(found, self.reference)
        return values

    def floor(self, images: ImageSet | None) -> dict:
        """What a perfect model would score, if a second real set was given."""
        if images is None:
            return {}
        with timed(self.seconds, "floor"):
            found = self.describe(images, hash_of(self.options.floor), "floor")
            if not self.features.processes.is_main:
                return {}
            values = replace(self, seconds={}).values(found)
        return {"floor": {"samples": self.options.floor, "count": images.count, **values}}

    def classes(self, inputs: Inputs, found: Described) -> tuple[RealSet | None, dict]:
        """The labelled real images, and the distances of the samples' classes to theirs."""
        if reason := obstacle(inputs.manifest, inputs.samples.count):
            return None, {"classes": {"left_out": reason}}
        with timed(self.seconds, "classes"):
            real, described = inputs.classes, self.reference
            if real:
                described = describe_real(real, self.features)
            else:
                real = labelled_reference(self.source)
            if not self.features.processes.is_main:
                return None, {}
            return real, {"classes": compare_classes(found, inputs.manifest, real, described)}

    def neighbours(self, inputs: Inputs, found: Described) -> dict:
        """The nearest training images of random samples, if they were given."""
        if not inputs.neighbours:
            return {}
        with timed(self.seconds, "neighbours"):
            return {
                "neighbours": find_neighbours(
                    found, inputs.neighbours.images, self.features, self.options.seed
                )
            }

    def uncertainty(self, found: Described) -> dict[str, dict]:
        """How far the Frechet distance can be trusted, as the options ask."""
        if "fid" not in self.metrics or POOL not in found.rows:
            raise UserError("bootstrap and extrapolate are of fid; add it to --metrics")
        sets = {
            "samples": found.rows[POOL],
            "reference": self.reference.statistics[POOL],
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
