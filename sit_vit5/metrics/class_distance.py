"""Distance of each class of samples to the same class of real images; agreement with labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sit_vit5.metrics.kid import FEWEST, kernel
from sit_vit5.metrics.metric import default_device
from sit_vit5.metrics.statistics import check_widths

# Of a class at most so many images of each side, evenly spread: kernel matrices of 8 MB.
MOST = 500


@dataclass(frozen=True)
class ClassDistances:
    """One number per class that both sides have, all (C,).

    labels: of the classes, ascending; samples, reference: images compared; distances: unbiased, so
    that equal distributions give 0 on average, and negative values too; noise: their standard
    deviation if the distributions were equal.
    """

    labels: np.ndarray
    samples: np.ndarray
    reference: np.ndarray
    distances: np.ndarray
    noise: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Distances in units of their noise: what classes are ranked by."""
        return self.distances / np.maximum(self.noise, np.finfo(np.float64).tiny)


def class_distances(
    *,
    samples: np.ndarray,
    sample_labels: np.ndarray,
    reference: np.ndarray,
    reference_labels: np.ndarray,
) -> ClassDistances:
    """Kernel distances of all classes with two images or more on each side.

    Features (N, D), labels (N,). The statistic is KID's unbiased squared MMD with kernel
    (x.y / D + 1)^3 (Binkowski et al., 2018) within the class. A Frechet distance of 50 images and
    2,048 features would be bias; a distance of the classes' means alone would be unbiased too, but
    blind to a class collapsed onto its mean.
    """
    check_widths(samples.shape[1], reference.shape[1])
    found = []
    for label in np.intersect1d(sample_labels, reference_labels).tolist():
        sides = (_chosen(sample_labels, label), _chosen(reference_labels, label))
        if min(map(len, sides)) >= FEWEST:
            x, y = samples[sides[0]], reference[sides[1]]
            found.append((label, len(x), len(y), *_distance(x, y)))
    labels, *columns = np.array(found, np.float64).reshape(-1, 5).T
    counts = (column.astype(np.int64) for column in columns[:2])
    return ClassDistances(labels.astype(np.int64), *counts, *columns[2:])


def _chosen(labels: np.ndarray, label: int) -> np.ndarray:
    """Numbers of at most `MOST` images of a class."""
    numbers = np.flatnonzero(labels == label)
    if len(numbers) > MOST:
        numbers = numbers[np.linspace(0, len(numbers) - 1, MOST).round().astype(np.int64)]
    return numbers


def _distance(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Squared MMD of rows (m, D) and (n, D), and its noise under equal distributions.

    There the three parts of the estimate are uncorrelated sums over pairs of the centred kernel,
    whose mean square s^2 over different rows gives the variance
    s^2 (2 / (m (m - 1)) + 2 / (n (n - 1)) + 4 / (m n)) (Gretton et al., 2012).
    """
    m, n = len(x), len(y)
    rows = torch.from_numpy(np.concatenate([x, y]).astype(np.float64)).to(default_device())
    values = kernel(rows, rows)
    trace_x, trace_y = values.diagonal()[:m].sum(), values.diagonal()[m:].sum()
    within_x = (values[:m, :m].sum() - trace_x) / (m * (m - 1))
    within_y = (values[m:, m:].sum() - trace_y) / (n * (n - 1))
    distance = within_x + within_y - 2 * values[:m, m:].mean()
    values = values - values.mean(0) - values.mean(1, keepdim=True) + values.mean()
    square = (values.square().sum() - values.diagonal().square().sum()) / ((m + n) * (m + n - 1))
    noise = (square * (2 / (m * (m - 1)) + 2 / (n * (n - 1)) + 4 / (m * n))).sqrt()
    return distance.item(), noise.item()


@dataclass(frozen=True)
class Agreement:
    """Shares in [0, 1]: samples given the asked class, and real held-out images given theirs."""

    samples: float
    held_out: float
    per_class: tuple[float, ...]


def class_agreement(
    *,
    train: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray],
    samples: tuple[np.ndarray, np.ndarray],
) -> Agreement:
    """Trains a support-vector classifier on the pixels of `train` and applies it to the others.

    Each argument: uint8 images (N, H, W, C) and labels (N,). The share on real held-out images
    says how far the classifier can be trusted.
    """
    # Imported here: scikit-learn takes a second.
    from sklearn.svm import SVC

    classifier = SVC(C=10).fit(_flat(train[0]), train[1])
    right = classifier.predict(_flat(samples[0])) == samples[1]
    per_class = [float(right[samples[1] == label].mean()) for label in np.unique(samples[1])]
    return Agreement(
        samples=float(right.mean()),
        held_out=float((classifier.predict(_flat(held_out[0])) == held_out[1]).mean()),
        per_class=tuple(per_class),
    )


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255.0
