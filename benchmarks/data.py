"""Reading data against what eats it, and against torchvision: `python benchmarks/data.py`.

Makes a latent cache of random moments and a folder of random JPEGs in a temporary folder, then
prints, measured in one run: batches per second from the cache, from memory and from disk, beside
the disk's own rate and the training of SiT-XL/2 on this machine; growth of memory; images per
second beside torchvision's ImageFolder with the same crop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder as TorchvisionFolder

from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import presets
from sit_vit5.data.cache_writer import Layout, ShardWriter, write_index
from sit_vit5.data.latent_cache import LatentCache
from sit_vit5.data.loader import Batch, StepLoader, iterate_images
from sit_vit5.data.sources import ImageFolder
from sit_vit5.data.transforms import center_crop
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.distributed import BatchPlan

BATCH = 256
CODEC = RecordedCodec("sd-vae-ema", {"name": "random", "scale": 0.18215}, True, {})


def main() -> None:
    """Parses and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cached", type=int, default=16384, help="images in the cache")
    parser.add_argument("--images", type=int, default=512, help="JPEGs in the folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=100, help="of one measurement")
    parser.add_argument("--long", type=int, default=1000, help="batches while memory is watched")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure; None: temporary")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.workers} workers")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cached(Path(folder), options)
        images(Path(folder), options)


def cached(folder: Path, options: argparse.Namespace) -> None:
    """The cache of 32x32x4 latents: rates, their consumer, memory."""
    cache = write_cache(folder / "cache", options.cached)
    size = sum(file.stat().st_size for file in cache.root.glob("*.bin"))
    per_image = size / len(cache)
    print(f"cache: {len(cache):,} images, {size / 1e9:.2f} GB, {per_image / 1024:.0f} KiB each")
    forget(cache.root)
    started = time.perf_counter()
    for file in sorted(cache.root.glob("*.bin")):
        with file.open("rb", buffering=0) as open_file:
            while open_file.read(1 << 24):
                pass
    disk = size / (time.perf_counter() - started)
    print(f"disk, read from front to back: {disk / 1e6:.0f} MB/s")
    eaten = training_rate()
    visit = per_image / 2  # one of the two mirrors
    for name, workers, cold in (
        ("from disk", options.workers, True),
        ("from memory", options.workers, False),
        ("from memory, no workers", 0, False),
    ):
        if cold:
            forget(cache.root)
        rate = batches_per_second(cache, workers, options.batches)
        print(
            f"{name}: {rate:.1f} batches/s of {BATCH}, {rate * BATCH * visit / 1e6:.0f} MB/s, "
            f"{rate * BATCH * visit / disk:.2f} of the disk's rate, {rate * BATCH / eaten:,.0f} "
            f"times what SiT-XL/2 eats here ({eaten:.2f} images/s)"
        )
    watch_memory(cache, options.long)


def write_cache(folder: Path, count: int) -> LatentCache:
    """A cache of random numbers, through the writer of the encoding."""
    folder.mkdir()
    layout = Layout(count, 4096, 2, (8, 32, 32), True, "float32")
    rng = np.random.default_rng(0)
    for number in layout.shards:
        writer = ShardWriter(folder, number, layout)
        for start in range(0, len(writer.missing), BATCH):
            rows = len(writer.missing[start : start + BATCH])
            writer.append(rng.standard_normal((rows, 2, 8, 32, 32), dtype=np.float32) - 1, {})
        writer.finish()
    settings = {
        "data": {"source": "random numbers"},
        "class_names": ["one"],
        "image_size": 256,
        "latent_shape": [4, 32, 32],
        "moments_shape": [8, 32, 32],
        "mirrors": 2,
        "dtype": "float32",
        "shard_size": layout.shard_size,
        "codec": CODEC.record(),
    }
    write_index(folder, layout, settings, np.zeros(count, np.int64), bad={})
    return LatentCache(folder, image_size=256)


def forget(folder: Path) -> None:
    """Drops the files from the system's memory."""
    for file in folder.glob("*.bin"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def stream(cache: LatentCache, workers: int) -> Iterator[list[Batch]]:
    """Batches without end, a new order and new mirrors at every call of the loader's seed."""
    return StepLoader(
        cache, BatchPlan(BATCH), seed=0, horizontal_flip=True, workers=workers, posterior=CODEC
    ).steps(0)


def batches_per_second(cache: LatentCache, workers: int, count: int) -> float:
    """After the workers have started."""
    batches = stream(cache, workers)
    next(batches)
    started = time.perf_counter()
    for _ in islice(batches, count):
        pass
    seconds = time.perf_counter() - started
    batches.close()
    return count / seconds


def training_rate(batch: int = 2) -> float:
    """Images per second through forward and backward of SiT-XL/2, bf16, on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoiser(
        presets.backbone("SiT-XL/2"), in_channels=4, input_size=(32, 32), num_classes=1000
    ).to(device)
    x, t = torch.randn(batch, 4, 32, 32, device=device), torch.rand(batch, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            model(x, t, labels).square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return batch / statistics.median(seconds)


def watch_memory(cache: LatentCache, count: int) -> None:
    """Own memory of this process while it reads; pages of the cache are the system's to drop."""
    batches = stream(cache, 0)
    for _ in islice(batches, 50):
        pass
    before = own_memory()
    for _ in islice(batches, count):
        pass
    batches.close()
    print(f"own memory over {count:,} batches: {(own_memory() - before) / 1e6:+.1f} MB")


def own_memory() -> int:
    """Bytes of memory that no file lies behind (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def images(folder: Path, options: argparse.Namespace) -> None:
    """JPEGs of ImageNet's usual size, decoded and cropped to 256 pixels."""
    root = folder / "jpegs"
    write_jpegs(root, options.images)
    ours, peer = ImageFolder(root, 256), TorchvisionFolder(root, transform=crop_to_tensor)
    batches = [range(start, start + 32) for start in range(0, options.images, 32)]
    pairs: list[tuple[float, float]] = []
    for _ in range(options.repeats):
        pairs.append(
            (
                seconds_of(lambda: iterate_images(ours, batches, workers=options.workers)),
                seconds_of(lambda: iter(DataLoader(peer, 32, num_workers=options.workers))),
            )
        )
    mine, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"JPEG 500x375 to 256: {options.images / mine:.0f} images/s, torchvision's ImageFolder "
        f"{options.images / theirs:.0f} images/s, ratio {ratio:.2f}"
    )


def write_jpegs(root: Path, count: int) -> None:
    """Smooth random pictures, 500x375, about 50 kB each."""
    rng = np.random.default_rng(0)
    (root / "one").mkdir(parents=True)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (47, 63, 3), dtype=np.uint8))
        fine = rng.integers(0, 16, (375, 500, 3), dtype=np.uint8)
        pixels = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) // 2 + fine
        Image.fromarray(pixels).save(root / "one" / f"{number:05d}.jpg", quality=90)


def crop_to_tensor(image: Image.Image) -> torch.Tensor:
    """What a user of torchvision writes to get the same pixels."""
    return torch.from_numpy(np.array(center_crop(image, 256)))


def seconds_of(make: Callable[[], Iterator]) -> float:
    """Seconds to go through an iterator."""
    started = time.perf_counter()
    for _ in make():
        pass
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
