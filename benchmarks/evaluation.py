"""Our evaluation against torch-fidelity's and scipy's: `python benchmarks/evaluation.py`.

Both see the same images through the same network; its weights are random, the time is the same. A
ratio above 1 means ours is faster. `--only` names one part; the memory is that of the process, so
that the part that measures it comes first.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import frechet
import numpy as np
import torch
import torch_fidelity

from sit_vit5.config import MetricsConfig
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.metrics import precision_recall

# The weights that the tests use.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from inception import random_inception

WIDTH = 2048
SUBSET = 1000  # of the kernel distance, torch-fidelity's default


class Images(torch.utils.data.Dataset):
    """As torch-fidelity takes them: uint8 (C, H, W), in memory."""

    def __init__(self, images: np.ndarray):
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index]


def main() -> None:
    """All parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--images", type=int, default=2000, help="samples, and reference images")
    parser.add_argument("--side", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the fastest counts")
    parser.add_argument("--samples", type=int, default=50_000, help="of precision and recall")
    parser.add_argument("--reference", type=int, default=10_000, help="of precision and recall")
    options = parser.parse_args()
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options)


def neighbours(options: argparse.Namespace) -> None:
    """Precision and recall: time, and the most memory the process had."""
    rng = np.random.default_rng(0)
    samples, reference = (
        rng.standard_normal((count, WIDTH), np.float32)
        for count in (options.samples, options.reference)
    )
    before = peak_gigabytes()
    start = time.perf_counter()
    precision_recall(samples=samples, reference=reference)
    print(
        f"precision and recall, {options.samples} samples and {options.reference} reference rows "
        f"of {WIDTH}: {time.perf_counter() - start:.0f} s, peak memory {peak_gigabytes():.2f} GB, "
        f"{before:.2f} GB of it libraries and features"
    )


def distance(options: argparse.Namespace) -> None:
    """The Frechet distance against scipy's square root."""
    del options  # one size
    frechet.main()


def whole_evaluation(options: argparse.Namespace) -> None:
    """FID, IS and KID, from images to numbers; then the others, from kept features."""
    rng = np.random.default_rng(0)
    shape = (2, options.images, options.side, options.side, 3)
    sets = rng.integers(0, 256, shape, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        work, cache = Path(folder), Path(folder) / "cache"
        weights = str(random_inception(work / "inception.pth"))
        for name, images in zip("ab", sets, strict=True):
            np.savez(work / f"{name}.npz", images)

        def ours(*metrics: str) -> dict:
            paths = (str(work / f"{name}.npz") for name in "ab")
            options = MetricsConfig(*paths, weights=weights, metrics=metrics, cache=str(cache))
            return evaluate(options)

        def first() -> dict:
            shutil.rmtree(cache, ignore_errors=True)
            return ours("fid", "is", "kid")

        def theirs() -> dict:
            return torch_fidelity.calculate_metrics(
                input1=Images(sets[0]), input2=Images(sets[1]), isc=True, fid=True, kid=True,
                kid_subset_size=min(SUBSET, options.images), cache=False, verbose=False,
                feature_extractor_weights_path=weights, save_cpu_ram=True,
                cuda=torch.cuda.is_available(),
            )  # fmt: skip

        runs = {"ours": first, "torch-fidelity": theirs}
        seconds, results = fastest(runs, options.repeats)
        taken = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(f"FID, IS and KID of {options.images} images against {options.images}: {taken}")
        print(f"  ratio {seconds['torch-fidelity'] / seconds['ours']:.2f}")
        fids = (
            results["ours"]["frechet_distance"],
            results["torch-fidelity"]["frechet_inception_distance"],
        )
        print(f"  the FIDs differ by {abs(fids[0] / fids[1] - 1):.1e} of their value")
        start = time.perf_counter()
        ours("fid", "is", "kid", "precision_recall")
        taken = time.perf_counter() - start
        print(f"  precision and recall too, from the kept features: {taken:.1f} s in all")


def fastest(
    runs: dict[str, Callable[[], dict]], repeats: int
) -> tuple[dict[str, float], dict[str, dict]]:
    """The least seconds of each and its last result; they take turns."""
    seconds, results = {}, {}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            results[name] = run()
            taken = time.perf_counter() - start
            seconds[name] = min(taken, seconds.get(name, taken))
    return seconds, results


def peak_gigabytes() -> float:
    """The most memory that this process had."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024 / 1e9


PARTS = {"neighbours": neighbours, "frechet": distance, "evaluation": whole_evaluation}


if __name__ == "__main__":
    main()
