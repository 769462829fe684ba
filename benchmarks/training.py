"""A whole training step against plain code: `python benchmarks/training.py`.

Ours is the trainer's own step: a batch of cached latents from the loader, loss, gradients,
clipping, AdamW, averages. Steps of both take turns; printed are medians, their ratio (above 1: ours
is faster) and the share of time outside of the work.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from data import CODEC, write_cache
from plain_sit import plain_step
from timing import matmul_peak, medians, synchronize

from sit_vit5.analysis.cost import denoiser_cost
from sit_vit5.config.parse import parse_train
from sit_vit5.training.trainer import Trainer


def main() -> None:
    """Parses and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["SiT-B/2", "ViT5-B/2"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument(
        "--modes", nargs="+", default=["eager", "compiled"], help="of ours; the peer is eager"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    peaks = {precision: matmul_peak(options.device, precision) for precision in options.precisions}
    with tempfile.TemporaryDirectory() as folder:
        write_cache(Path(folder) / "cache", max(1024, options.batch))
        for precision in options.precisions:
            peer = plain_step(options.batch, precision, options.device)
            for model in options.models:
                for mode in options.modes:
                    run = trainer(model, precision, mode, Path(folder), options.batch)
                    measure(run, mode, peer, peaks[precision], options)
    print(f"peak memory of the process: {peak_memory() / 1e9:.1f} GB")


def measure(
    run: Trainer,
    mode: str,
    peer: Callable[[], None],
    peak: float,
    options: argparse.Namespace,
) -> None:
    """Our step beside the peer's, its share of the peak, and the time outside of the work."""
    clock = Clock(run, options.device)
    ours, its = medians([clock.step, peer], repeats=options.repeats, device=options.device)
    cost = denoiser_cost(run.config.backbone, in_channels=4, input_size=(32, 32), num_classes=1000)
    share = 3 * cost.flops * options.batch / ours / peak
    print(
        f"{run.config.model} batch {options.batch}, {run.config.precision}, {mode}: "
        f"{ours:.3f} s, plain SiT-B/2 {its:.3f} s, "
        f"ratio {its / ours:.2f}; {share:.0%} of the matmul peak; outside forward, backward and "
        f"optimizer {clock.outside():.2%}",
        flush=True,
    )
    clock.close()


def trainer(model: str, precision: str, mode: str, folder: Path, batch: int) -> Trainer:
    """A run on the cache that saves and draws nothing."""
    from sit_vit5.data import build_source

    name = f"{model.replace('/', '-')}-{precision}-{mode}"
    config, _ = parse_train(
        [
            "--model", model, "--precision", precision, "--batch-size", str(batch),
            "--data.source", "latents", "--data.path", str(folder / "cache"), "--name", name,
            "--output-dir", str(folder), "--data.workers", "1",
            "--compile", str(mode == "compiled"), "--log-every", "1000000",
        ]
    )  # fmt: skip
    return Trainer(config, build_source(config.data), CODEC, preview=None)


class Clock:
    """Takes a trainer's steps, and the time that the work itself took of them."""

    def __init__(self, run: Trainer, device: str):
        self.run, self.device = run, device
        self.stream = run.loader.steps(0)
        self.whole: list[float] = []
        self.work: list[float] = []
        run.steps.say = lambda line: None
        for owner, name in (
            (run.steps, "_gradients"),
            (run.learner, "update"),
            (run.learner, "average"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def step(self) -> None:
        """One step of the trainer, and the reading of what it came to."""
        self.work.append(0.0)
        started = time.perf_counter()
        batches, _ = self.run._next(self.stream)
        self.run.steps.train(batches)
        self.run.steps.settle()
        synchronize(self.device)
        self.whole.append(time.perf_counter() - started)

    def outside(self) -> float:
        """Median share of a step that is neither forward, backward, optimizer nor averages."""
        shares = [1 - work / whole for work, whole in zip(self.work, self.whole, strict=True)]
        return statistics.median(shares[2:])

    def close(self) -> None:
        """Ends the loader's processes."""
        self.stream.close()

    def _timed(self, call: Callable) -> Callable:
        def timed(*arguments: object, **options: object) -> object:
            synchronize(self.device)
            started = time.perf_counter()
            result = call(*arguments, **options)
            synchronize(self.device)
            self.work[-1] += time.perf_counter() - started
            return result

        return timed


def peak_memory() -> int:
    """Bytes, of the device where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
