"""Does a sample show the class that was asked for? A classifier of real images answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
