"""Nearest neighbours of some rows among a stream of many: are samples copies of real images?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.metrics.metric import default_device

# Real images nearer to one another than this part of them: the measure of "too near", in percent.
PERCENTILE = 1.0
DEVIATIONS = 3  # of the share's noise, above which it is told from chance


class Nearest:
    """The k nearest rows of a stream to each query; memory does not grow with the stream.

    queries: features (Q, D); own: (Q,) the query's own number in the stream, which is then no
    neighbour of it, -1 for none. Squared distances are fp64.
    """

    def __init__(self, queries: np.ndarray, count: int, own: np.ndarray):
        self.device = default_device()
        # Distances of far-off points cancel; around a common centre they do not.
        self.centre = queries.mean(0, dtype=np.float64)
        self.queries = self._around_centre(queries)
        self.norms = self.queries.square().sum(1)
        self.own = torch.from_numpy(own).to(self.device)
        self.count = count
        self.squares = torch.full(
            (len(queries), count), torch.inf, dtype=torch.float64, device=self.device
        )
        self.numbers = torch.full((len(queries), count), -1, device=self.device)

    def add(self, rows: np.ndarray, start: int) -> None:
        """Looks at rows start, start + 1, ... of the stream, (n, D)."""
        found = self._around_centre(rows)
        squares = self.norms[:, None] + found.square().sum(1) - 2 * self.queries @ found.T
        numbers = torch.arange(start, start + len(rows), device=self.device)
        squares = squares.clamp(min=0).masked_fill(numbers == self.own[:, None], torch.inf)
        self._keep(squares, numbers.expand_as(squares))

    def merge(self, squares: torch.Tensor, numbers: torch.Tensor) -> None:
        """Adds what another process found in its part of the stream."""
        self._keep(squares.to(self.device), numbers.to(self.device))

    def _keep(self, squares: torch.Tensor, numbers: torch.Tensor) -> None:
        """The nearest of what is kept and these, (Q, n); of equal ones the earlier."""
        numbers = torch.cat([self.numbers, numbers], 1)
        squares, order = torch.cat([self.squares, squares], 1).sort(dim=1, stable=True)
        self.squares = squares[:, : self.count]
        self.numbers = numbers.gather(1, order[:, : self.count])

    def _around_centre(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows - self.centre).to(self.device)

    @property
    def distances(self) -> np.ndarray:
        """(Q, k), ascending; inf where the stream was shorter."""
        return self.squares.sqrt().cpu().numpy()


@dataclass(frozen=True)
class Closeness:
    """How near samples come to training images, beside how near real images come to one another.

    median, real_median: of the distances to the nearest; threshold: the `PERCENTILE` of the real
    ones; closer: share of samples below it, where as many as PERCENTILE in 100 are expected;
    limit: the share above which chance is no explanation.
    """

    median: float
    real_median: float
    threshold: float
    closer: float
    limit: float


def closeness(samples: np.ndarray, real: np.ndarray) -> Closeness:
    """Of distances to the nearest training image, (Q,), and of training images to another, (R,).

    A new real image is as near to the training set as one of its images is to the others; so the
    left-out distances are what samples without copies would show. The limit takes the noise of
    both shares as binomial. Below one of R real ones, the least that can be told, lies one sample
    in R + 1.
    """
    threshold = float(np.percentile(real, PERCENTILE))
    expected = max(PERCENTILE / 100, 1 / (len(real) + 1))
    noise = np.sqrt(expected * (1 - expected) * (1 / len(samples) + 1 / len(real)))
    return Closeness(
        float(np.median(samples)),
        float(np.median(real)),
        threshold,
        float(np.mean(samples < threshold)),
        float(expected + DEVIATIONS * noise),
    )
