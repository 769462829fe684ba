"""Features of images in one pass, and an accumulator of all metrics over processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sit_vit5.metrics.features import POOL, Extractor
from sit_vit5.metrics.metric import FeatureSet
from sit_vit5.metrics.registry import METRICS
from sit_vit5.metrics.statistics import Array, Moments, Statistics, to_numpy
from sit_vit5.utils.errors import UserError, choose
from sit_vit5.utils.memory import memory_errors
from sit_vit5.utils.progress import progress_bar


def extract_statistics(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> dict[str, Statistics]:
    """Statistics of each output over all batches of uint8 images, in bounded memory.

    title: what error messages and the progress bar call the images. Refuses an empty set.
    """
    moments = {output: Moments() for output in outputs}
    for found in feature_batches(
        extractor, batches, title=title, total=total, outputs=outputs, shown=shown
    ):
        for output, rows in found.items():
            moments[output].add(rows)
    return {output: found.statistics() for output, found in moments.items()}


def extract_features(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> dict[str, np.ndarray]:
    """Features (N, D) of each output in the order of the images. Refuses an empty set."""
    parts = list(
        feature_batches(extractor, batches, title=title, total=total, outputs=outputs, shown=shown)
    )
    return {output: np.concatenate([part[output] for part in parts]) for output in outputs}


def feature_batches(
    extractor: Extractor,
    batches: Iterable[np.ndarray],
    *,
    title: str,
    total: int,
    outputs: Sequence[str] = (POOL,),
    shown: bool = True,
) -> Iterator[dict[str, np.ndarray]]:
    """Each output of each batch. Refuses an empty set and features that are not finite."""
    empty = True
    with (
        progress_bar(total, unit="image", title=title, shown=shown) as bar,
        memory_errors("lower --batch-size"),
    ):
        for images in batches:
            found = extractor(images, outputs)
            if not all(np.isfinite(rows).all() for rows in found.values()):
                raise UserError(f"{title}: non-finite features; check the extractor")
            empty = False
            yield found
            bar.update(len(images))
    if empty:
        raise UserError(f"{title}: no images")


@dataclass(frozen=True)
class State:
    """What an accumulator has seen: plain arrays, to be sent to another process.

    indices: (N,) numbers of the images; rows: features (N, D) by output; statistics: of the outputs
    that no metric needs rows of.
    """

    indices: np.ndarray
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    statistics: Mapping[str, Statistics] = field(default_factory=dict)


class Accumulator:
    """Metrics of images 0 .. N - 1 that arrive in any order, on any number of processes.

    Memory is bounded where the metrics allow it: fid and sfid alone keep mean and covariance (34 MB
    each); others keep features, 8 KB an image for precision_recall and kid, 4 KB for is. From
    features the result is that of the images in order of their numbers, whoever made them; from
    statistics it is the same but for the order of sums, about 1e-12 of it. On several processes:

        >>> mine = Accumulator(extractor, ("fid", "kid"), reference)
        >>> for indices in (range(0, 40), range(40, 60)):   # this process's share
        ...     mine.update(images[indices], indices)
        >>> whole = Accumulator(extractor, ("fid", "kid"), reference)
        >>> for state in gather([mine.state()], processes): # sit_vit5.utils.distributed
        ...     whole.merge(state)
        >>> sorted(whole.compute())[:2]
        ['frechet_distance', 'kernel_distance']
    """

    def __init__(
        self,
        extractor: Extractor,
        metrics: Sequence[str] = ("fid",),
        reference: FeatureSet | None = None,
    ):
        """reference: needed by all metrics but `is`, for `compute` alone; see `describe`."""
        self.extractor, self.reference = extractor, reference or FeatureSet()
        self.metrics = {name: choose("metric", name, METRICS) for name in metrics}
        needs = self.metrics.values()
        outputs = dict.fromkeys(metric.output for metric in needs)
        with_rows = {metric.output for metric in needs if metric.samples == "rows"}
        self._rows: dict[str, list[np.ndarray]] = {
            output: [] for output in outputs if output in with_rows
        }
        self._moments = {output: Moments() for output in outputs if output not in with_rows}
        self._merged: list[State] = []
        self._indices: list[np.ndarray] = []

    def update(self, images: Array, indices: Sequence[int]) -> None:
        """Adds images, uint8 (B, H, W, C), of these numbers."""
        images = to_numpy(images)
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(indices):
            raise UserError(
                f"expected {len(indices)} uint8 images (B, H, W, C), found {images.dtype} "
                f"{images.shape}"
            )
        if not len(images):
            return
        found = self.extractor(images, (*self._rows, *self._moments))
        self._indices.append(np.asarray(indices, np.int64))
        for output, rows in self._rows.items():
            rows.append(found[output])
        for output, moments in self._moments.items():
            moments.add(found[output])

    def merge(self, state: State) -> None:
        """Adds what another accumulator of the same metrics has seen."""
        self._merged.append(state)

    def state(self) -> State:
        """All that was added by `update` and `merge`, in order of the images' numbers."""
        own = []
        if self._indices:
            own = [
                State(
                    np.concatenate(self._indices),
                    {output: np.concatenate(rows) for output, rows in self._rows.items()},
                    {output: found.statistics() for output, found in self._moments.items()},
                )
            ]
        states = [state for state in own + self._merged if len(state.indices)]
        if not states:
            return State(np.zeros(0, np.int64))
        # Statistics are summed by the first image of each part, whoever merges them.
        states.sort(key=lambda state: state.indices.min())
        indices = np.concatenate([state.indices for state in states])
        order = np.argsort(indices)
        return State(
            indices[order],
            {
                output: np.concatenate([state.rows[output] for state in states])[order]
                for output in self._rows
            },
            {
                output: merge_statistics([state.statistics[output] for state in states])
                for output in self._moments
            },
        )

    def compute(self) -> dict[str, float | None]:
        """The values of all metrics; refuses images that are missing or came twice."""
        for name, metric in self.metrics.items():
            if metric.reference and not self.reference.has(metric.reference, metric.output):
                raise UserError(
                    f"metric {name} needs {metric.reference} of the reference's {metric.output} "
                    "features"
                )
        state = self.state()
        wrong = np.flatnonzero(state.indices != np.arange(len(state.indices)))
        if not len(state.indices) or len(wrong):
            where = f" around image {wrong[0]}" if len(wrong) else ""
            raise UserError(
                f"expected images 0 .. N - 1 once each, found {len(state.indices)} with a gap or a "
                f"repeat{where}"
            )
        samples = describe(
            state.rows,
            [metric.output for metric in self.metrics.values() if metric.samples != "rows"],
        )
        samples = FeatureSet(samples.rows, {**samples.statistics, **state.statistics})
        values: dict[str, float | None] = {}
        for metric in self.metrics.values():
            values |= metric.function(samples, self.reference)
        return values


def describe(rows: Mapping[str, np.ndarray], outputs: Sequence[str]) -> FeatureSet:
    """Features by output, with mean and covariance of those in `outputs`."""
    statistics = {output: Statistics.of(rows[output]) for output in outputs if output in rows}
    return FeatureSet(rows, statistics)


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of all parts together, of which there is one at least."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    return whole
