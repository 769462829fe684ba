"""Improved precision and recall (Kynkaanniemi et al., 2019) with ADM's rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.metrics.features import POOL
from sit_vit5.metrics.metric import FeatureSet, Metric, default_device
from sit_vit5.metrics.statistics import Features, check_widths, rows_of
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.progress import progress_bar

NEIGHBOURS = 3
# Rows and columns of a matrix of distances at a time: 34 MB in fp64.
BLOCK = 2048
# Two equal rows differ by rounding, as a part of their squared norms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class PrecisionRecall:
    """precision: share of samples within the reference's manifold; recall: share of reference
    images within that of the samples."""

    precision: float
    recall: float


def precision_recall(
    *, samples: Features, reference: Features, neighbours: int = NEIGHBOURS
) -> PrecisionRecall:
    """Precision and recall of samples. Features: (N, D) of each set.

    A set's manifold is the union of balls around its points, each up to the k-th nearest other
    point, borders included. Distances are fp64, where ADM's are fp16: they differ by a few points
    in a thousand. Memory: the features, and 0.2 GB at 2,048 numbers each.
    """
    rows = {"samples": rows_of(samples, "samples"), "reference": rows_of(reference, "reference")}
    check_widths(rows["samples"].shape[1], rows["reference"].shape[1])
    for what, found in rows.items():
        if len(found) <= neighbours:
            raise UserError(
                f"precision and recall need more than {neighbours} images of each set; found "
                f"{len(found)} {what}"
            )
    # Distances of far-off points cancel; around one common centre they do not.
    centre = np.mean(rows["reference"], axis=0, dtype=np.float64)
    sets = {what: _Points(found, centre) for what, found in rows.items()}
    return _shares(sets["samples"], sets["reference"], neighbours)


class _Points:
    """Rows around a centre, given out in fp64 blocks; norms: their squares, (N,)."""

    def __init__(self, rows: np.ndarray, centre: np.ndarray):
        self.rows, self.centre, self.device = rows, centre, default_device()
        self.norms = torch.cat([block.square().sum(1) for _, block in self.blocks()])

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, first: int = 0) -> Iterator[tuple[slice, torch.Tensor]]:
        """Consecutive blocks from row `first`, and where they stand."""
        for start in range(first, len(self.rows), BLOCK):
            part = slice(start, min(start + BLOCK, len(self.rows)))
            yield part, torch.from_numpy(self.rows[part] - self.centre).to(self.device)


def _shares(samples: _Points, reference: _Points, neighbours: int) -> PrecisionRecall:
    total = len(samples) ** 2 + len(reference) ** 2 + 2 * len(samples) * len(reference)
    with progress_bar(total, unit="pair", title="precision and recall") as bar:
        radii = {points: _radii(points, neighbours, bar.update) for points in (samples, reference)}
        inside_reference, inside_samples = (
            torch.zeros(len(points), dtype=torch.bool, device=points.device)
            for points in (samples, reference)
        )
        for rows, a in samples.blocks():
            for columns, b in reference.blocks():
                squares = _squares(a, b, samples.norms[rows], reference.norms[columns])
                # Of each pair: one image far off must not widen the others' balls.
                squares -= ROUNDING * (samples.norms[rows, None] + reference.norms[columns])
                inside_reference[rows] |= (squares <= radii[reference][columns]).any(1)
                inside_samples[columns] |= (squares <= radii[samples][rows, None]).any(0)
                bar.update(2 * squares.numel())
    return PrecisionRecall(
        inside_reference.double().mean().item(), inside_samples.double().mean().item()
    )


def _radii(points: _Points, neighbours: int, count) -> torch.Tensor:
    """Squared distance of each point to its k-th nearest other one, (N,)."""
    # The point itself is among the nearest: one more.
    nearest = torch.full((len(points), neighbours + 1), torch.inf, dtype=torch.float64)
    nearest = nearest.to(points.device)
    for rows, a in points.blocks():
        for columns, b in points.blocks(rows.start):
            squares = _squares(a, b, points.norms[rows], points.norms[columns])
            count(squares.numel() * (1 if rows == columns else 2))
            nearest[rows] = _smallest(nearest[rows], squares, neighbours + 1)
            if rows != columns:  # each pair once: distances are symmetric
                nearest[columns] = _smallest(nearest[columns], squares.T, neighbours + 1)
    return nearest.amax(1)


def _smallest(before: torch.Tensor, more: torch.Tensor, count: int) -> torch.Tensor:
    """The smallest numbers of each row of both, (n, count)."""
    found = more.topk(min(count, more.shape[1]), dim=1, largest=False, sorted=False).values
    return torch.cat([before, found], 1).topk(count, dim=1, largest=False, sorted=False).values


def _squares(
    a: torch.Tensor, b: torch.Tensor, norms_a: torch.Tensor, norms_b: torch.Tensor
) -> torch.Tensor:
    """Squared distances (n, m) of rows (n, D) and (m, D)."""
    return torch.addmm(norms_a[:, None] + norms_b, a, b.T, alpha=-2)


def _of(samples: FeatureSet, reference: FeatureSet) -> dict[str, float | None]:
    found = precision_recall(samples=samples.rows[POOL], reference=reference.rows[POOL])
    return {"precision": found.precision, "recall": found.recall}


PRECISION_RECALL = Metric(
    POOL,
    "rows",
    "rows",
    {"precision": "precision", "recall": "recall"},
    _of,
    fewest=NEIGHBOURS + 1,
)
