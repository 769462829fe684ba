"""Copies among samples: random samples and their nearest training images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from sit_vit5.evaluation.checks import Finding
from sit_vit5.evaluation.features import Pass
from sit_vit5.evaluation.observations import SEEN, Observations
from sit_vit5.evaluation.real_sets import ChosenSet
from sit_vit5.metrics.features import POOL
from sit_vit5.metrics.image_sets import ImageSet
from sit_vit5.metrics.metric import FeatureSet
from sit_vit5.metrics.neighbours import PERCENTILE, Nearest, closeness
from sit_vit5.utils import rng
from sit_vit5.utils.distributed import agree, gather
from sit_vit5.utils.errors import UserError

# Queries per side (samples, real images); queries in the figure; neighbours per query.
MOST_QUERIES, SHOWN, KEPT = 1000, 6, 4
COPIES_NAMED = 20


@dataclass(frozen=True)
class Queries:
    """Queries of the search: features (Q, D), and `own` indices as `Nearest` takes them.

    samples: indices of the samples, which come first; real training images follow. digests: of all
    samples, to detect copies among them.
    """

    rows: np.ndarray
    own: np.ndarray
    samples: np.ndarray
    digests: np.ndarray


def find_neighbours(samples: FeatureSet, training: ImageSet, features: Pass, seed: int) -> dict:
    """Return the nearest training images as JSON values, on the main process only.

    samples: features with `POOL` and `SEEN` on that process. Memory: the queries'
    neighbours and eight bytes per training image.
    """
    if training.count <= KEPT:
        raise UserError(f"{training.name} holds {training.count} images; give {KEPT + 1} or more")
    queries = _queries(samples, training, features, seed)
    nearest, digests = Nearest(queries.rows, KEPT, queries.own), [np.zeros(0, np.uint64)]
    with agree(features.processes):
        for start, found in features.stream(training, (POOL, SEEN), "training images"):
            nearest.add(found[POOL], start)
            digests.append(Observations.of(found).digests)
    part = (nearest.squares.cpu(), nearest.numbers.cpu(), np.concatenate(digests))
    parts = gather([part], features.processes)
    if not features.processes.is_main:
        return {}
    for squares, numbers, _ in parts[1:]:
        nearest.merge(squares, numbers)
    seen = np.concatenate([part[2] for part in parts])
    copies = np.flatnonzero(np.isin(queries.digests, seen))
    return _said(queries, nearest, copies, training, features)


def _queries(samples: FeatureSet, training: ImageSet, features: Pass, seed: int) -> Queries:
    """Random samples and random training images, the same on every process."""
    order = rng.generator(seed, "training images left out").permutation(training.count)
    own = np.sort(order[:MOST_QUERIES])
    real = features.describe(
        ChosenSet(training, own), rows=[POOL], statistics=(), identity=None, title="left-out images"
    )
    made = None
    if features.processes.is_main:
        rows = samples.rows[POOL]
        chosen = rng.generator(seed, "samples with neighbours").permutation(len(rows))
        chosen = chosen[:MOST_QUERIES]
        made = Queries(
            np.concatenate([rows[chosen], real.rows[POOL]]),
            np.concatenate([np.full(len(chosen), -1), own]),
            chosen,
            Observations.of(samples.rows).digests,
        )
    return next(part for part in gather([made], features.processes) if part is not None)


def _said(
    queries: Queries, nearest: Nearest, copies: np.ndarray, training: ImageSet, features: Pass
) -> dict:
    count = len(queries.samples)
    distances, numbers = nearest.distances, nearest.numbers.cpu().numpy()
    closest = np.argsort(distances[:count, 0], kind="stable")[:SHOWN]

    def shown(rows: Iterator[int] | np.ndarray) -> list[dict]:
        return [
            {
                "sample": int(queries.samples[row]),
                "nearest": numbers[row].tolist(),
                "distances": [float(f"{value:.6g}") for value in distances[row]],
            }
            for row in rows
        ]

    return {
        "training": training.name,
        "count": training.count,
        "features": f"{POOL} features of {features.extractor.identity['features']}",
        "queries": count,
        "left_out": len(queries.own) - count,
        "percentile": PERCENTILE,
        **asdict(closeness(distances[:count, 0], distances[count:, 0])),
        "copies": len(copies),
        "copied": copies[:COPIES_NAMED].tolist(),
        "random": shown(range(min(SHOWN, count))),
        "closest": shown(closest),
    }


def neighbour_findings(said: dict) -> Iterator[Finding]:
    """Warnings on copies and on samples too near to training images."""
    if said["copies"]:
        yield Finding(
            "warning",
            f"samples that are training images, pixel by pixel: {said['copies']:,}, such as "
            f"{said['copied'][0]}",
        )
    if said["closer"] > said["limit"]:
        yield Finding(
            "warning",
            f"{said['closer']:.1%} of samples are nearer to a training image than all but "
            f"{said['percentile']:g}% of training images are to another; chance explains "
            f"{said['limit']:.1%}: memorised images, or samples more typical than real ones",
        )
