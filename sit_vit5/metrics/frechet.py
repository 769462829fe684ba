"""The Frechet distance of two Gaussians (Heusel et al., 2017), without a matrix square root."""

from __future__ import annotations

import numpy as np


def frechet_distance(
    mean1: np.ndarray, covariance1: np.ndarray, mean2: np.ndarray, covariance2: np.ndarray
) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) in fp64. means: (D,); covariances: (D, D).

    tr (C1 C2)^(1/2) is the sum of the square roots of the eigenvalues of S C2 S with S the
    symmetric root of C1: that product is symmetric and positive semi-definite, so its eigenvalues
    are real, also for rank-deficient covariances, where `scipy.linalg.sqrtm` goes astray (E1).
    """
    mean1, mean2 = (np.asarray(mean, np.float64) for mean in (mean1, mean2))
    covariance1, covariance2 = (np.asarray(c, np.float64) for c in (covariance1, covariance2))
    values, vectors = np.linalg.eigh(covariance1)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    product = root @ covariance2 @ root
    eigenvalues = np.linalg.eigvalsh((product + product.T) / 2)
    cross = np.sqrt(eigenvalues.clip(min=0)).sum()
    shift = mean1 - mean2
    return float(shift @ shift + np.trace(covariance1) + np.trace(covariance2) - 2 * cross)


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
    if abs(found - expected) > 1e-6 * expected or abs(same) > 1e-6:
        raise RuntimeError(
            f"self-test of the Frechet distance failed: {found} instead of {expected}, {same} "
            "instead of 0; this numpy's linear algebra is broken, reinstall numpy"
        )
