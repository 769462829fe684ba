"""The Frechet distance of two Gaussians (Heusel et al., 2017), without a matrix square root."""

from __future__ import annotations

import numpy as np


def frechet_distance(
    mean1: np.ndarray, covariance1: np.ndarray, mean2: np.ndarray, covariance2: np.ndarray
) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) in fp64. means: (D,); covariances: (D, D).

    With symmetric factors C = F F^T, tr (C1 C2)^(1/2) is the sum of the singular values of
    F1^T F2. Nothing here needs a matrix square root, where scipy goes astray (E1), nor the root of
    an eigenvalue that is only rounding, so rank-deficient covariances are exact too: against
    itself a set of 1,000 rows in 2,048 dimensions gives 5e-13, by eigenvalues of C1 C2 2e-5.
    """
    mean1, mean2 = (np.asarray(mean, np.float64) for mean in (mean1, mean2))
    covariance1, covariance2 = (np.asarray(c, np.float64) for c in (covariance1, covariance2))
    cross = np.linalg.svd(_factor(covariance1).T @ _factor(covariance2), compute_uv=False).sum()
    shift = mean1 - mean2
    distance = shift @ shift + np.trace(covariance1) + np.trace(covariance2) - 2 * cross
    return float(max(distance, 0.0))  # rounding alone makes it negative


def _factor(covariance: np.ndarray) -> np.ndarray:
    """F (D, r) with F F^T = covariance, r its numerical rank."""
    values, vectors = np.linalg.eigh(covariance)
    rounding = values.max(initial=0) * len(values) * np.finfo(np.float64).eps
    kept = values > rounding
    return vectors[:, kept] * np.sqrt(values[kept])


def self_test() -> None:
    """Stops an installation whose linear algebra is wrong, before it prints a number (E2).

    Diagonal Gaussians in a rotated basis have a closed form: |m|^2 + sum (sqrt a - sqrt b)^2.
    """
    rng = np.random.Generator(np.random.Philox(key=1))
    basis, _ = np.linalg.qr(rng.standard_normal((32, 32)))
    a, b = rng.random(32), rng.random(32)
    a[:8] = 0  # rank-deficient, as with fewer samples than features
    shift = rng.standard_normal(32)
    expected = shift @ shift + np.square(np.sqrt(a) - np.sqrt(b)).sum()
    c1, c2 = (basis * a) @ basis.T, (basis * b) @ basis.T
    found = frechet_distance(np.zeros(32), c1, shift, c2)
    same = frechet_distance(shift, c1, shift, c1)
    if abs(found - expected) > 1e-9 * expected or abs(same) > 1e-9:
        raise RuntimeError(
            f"self-test of the Frechet distance failed: {found} instead of {expected}, {same} "
            "instead of 0; this numpy's linear algebra is broken, reinstall numpy"
        )
