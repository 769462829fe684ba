"""The stages of a comparison: features, metrics, and what else was asked for, each timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from tqdm import tqdm

from sit_vit5.config import MetricsConfig
from sit_vit5.errors import UserError
from sit_vit5.evaluation.classes import compare_classes, describe_real, obstacle
from sit_vit5.evaluation.feature_pass import MOST_ROWS, identity_of
from sit_vit5.evaluation.inputs import hash_of
from sit_vit5.evaluation.neighbours import find_neighbours
from sit_vit5.evaluation.opened import Inputs
from sit_vit5.evaluation.real_sets import RealSet, check_matching, labelled_reference
from sit_vit5.evaluation.reference import Reference, timed
from sit_vit5.evaluation.selftest import self_test_of
from sit_vit5.metrics.extractors import POOL
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import Described, Metric
from sit_vit5.metrics.uncertainty import (
    POINTS,
    bootstrap_frechet_distance,
    extrapolated_frechet_distance,
)
from sit_vit5.progress import progress_bar


@dataclass(frozen=True)
class Run:
    """The metrics of sets of images against one reference; seconds: by stage, filled on the way."""

    options: MetricsConfig
    reference: Reference
    metrics: Mapping[str, Metric]
    seconds: dict[str, float] = field(default_factory=dict)

    def describe(self, images: ImageSet, sha256: str | None, title: str) -> Described:
        """Features and statistics of images, all in one pass."""
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

    def values(self, found: Described) -> dict[str, float | None]:
        """Every metric's numbers."""
        values: dict[str, float | None] = {}
        for name, metric in self.metrics.items():
            with timed(self.seconds, name):
                values |= metric.function(found, self.reference.described)
        return values

    def floor(self, images: ImageSet | None) -> dict:
        """What a perfect model would score, if a second real set was given."""
        if images is None:
            return {}
        with timed(self.seconds, "floor"):
            found = self.describe(images, hash_of(self.options.floor), "floor")
        if not self._is_main:
            return {}
        values = replace(self, seconds={}).values(found)
        return {"floor": {"samples": self.options.floor, "count": images.count, **values}}

    def classes(self, inputs: Inputs, found: Described) -> tuple[RealSet | None, dict]:
        """The labelled real images, and the distances of the samples' classes to theirs."""
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

    def neighbours(self, inputs: Inputs, found: Described) -> dict:
        """The nearest training images of random samples, if they were given."""
        if not inputs.neighbours:
            return {}
        training, features = inputs.neighbours.images, self.reference.features
        with timed(self.seconds, "neighbours"):
            return {"neighbours": find_neighbours(found, training, features, self.options.seed)}

    def extras(self, found: Described) -> dict[str, dict]:
        """What the options ask for besides the metrics."""
        extras = {}
        if self.options.bootstrap or self.options.extrapolate:
            extras["uncertainty"] = self._uncertainty(found)
        if self.options.selftest:
            reference = self.reference
            extras["selftest"] = self_test_of(
                reference.described, self.metrics, reference.extractor.extractor
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

    @property
    def _is_main(self) -> bool:
        return self.reference.features.processes.is_main


def check_uncertainty(metrics: Mapping[str, Metric], count: int) -> None:
    """Refuses, before the long part, what cannot have an interval or a limit."""
    if "fid" not in metrics:
        raise UserError("bootstrap and extrapolate are of fid; add it to --metrics")
    if not 2 * POINTS <= count <= MOST_ROWS:
        raise UserError(
            f"bootstrap and extrapolate take {2 * POINTS} to {MOST_ROWS:,} samples, found {count:,}"
        )
