"""Our Frechet distance against scipy's `sqrtm`, time and error: `python benchmarks/frechet.py`.

The exact value is known: both covariances share a basis. A ratio above 1 means ours is faster.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
from scipy.linalg import sqrtm

from sit_vit5.metrics import frechet_distance

WIDTH = 2048
REPEATS = 3
ZERO = np.zeros(WIDTH)


def by_sqrtm(c1: np.ndarray, c2: np.ndarray) -> float:
    """The textbook formula as ADM and pytorch-fid compute it."""
    return float(np.trace(c1 + c2 - 2 * np.real(sqrtm(c1 @ c2))))


def measure(name: str, function, exact: float) -> float:
    """Median seconds; prints the error."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        found = function()
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds)[REPEATS // 2]
    print(f"  {name:<6} {median:6.2f} s   error {abs(found - exact):.1e} of {exact:.1f}")
    return median


def main() -> None:
    """Full rank, and the rank of 1,000 samples."""
    warnings.simplefilter("ignore")  # sqrtm warns of singular input
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))
    for rank in (WIDTH, 999):
        a, b = rng.random(WIDTH), rng.random(WIDTH)
        a[rank:] = b[rank:] = 0
        exact = float(np.square(np.sqrt(a) - np.sqrt(b)).sum())
        c1, c2 = (basis * a) @ basis.T, (basis * b) @ basis.T
        print(f"{WIDTH} features, rank {rank}")
        ours = measure("ours", lambda c1=c1, c2=c2: frechet_distance(ZERO, c1, ZERO, c2), exact)
        theirs = measure("sqrtm", lambda c1=c1, c2=c2: by_sqrtm(c1, c2), exact)
        print(f"  ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
