"""Tiny data sets in every format: two classes, twelve images."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from sit_vit5.config import DataConfig

COUNT = 12
LABELS = np.arange(COUNT) % 2


def pixels(seed: int = 0, *, channels: int = 3, size: tuple[int, int] = (20, 16)) -> np.ndarray:
    """Noise below 2 * seed black rows, uint8 (N, H, W, C): so coded, seeds differ in length."""
    shape = (COUNT, *size, channels)
    noise = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    noise[:, : 2 * seed] = 0
    return noise


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_idx(path: Path, values: np.ndarray) -> Path:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows(seed: int = 0, labels: np.ndarray = LABELS):
    """A data set of Hugging Face with the columns picture and kind."""
    import datasets

    features = datasets.Features(
        {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    coded = [{"bytes": png(image), "path": None} for image in pixels(seed)]
    return datasets.Dataset.from_dict({"picture": coded, "kind": labels}, features=features)


def folder(root: Path, seed: int) -> DataConfig:
    for number, image in enumerate(pixels(seed)):
        file = root / "data" / ("cat", "dog")[LABELS[number]] / f"{seed}_{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))
    return DataConfig(path=str(root / "data"), image_size=8)


def huggingface(root: Path, seed: int) -> DataConfig:
    rows(seed).save_to_disk(root / "saved")
    return DataConfig(path=str(root / "saved"), image_size=8)


def idx(root: Path, seed: int) -> DataConfig:
    root.mkdir(parents=True, exist_ok=True)
    grey = pixels(seed, channels=1, size=(28, 28))[..., 0]
    write_idx(root / "train-images-idx3-ubyte.gz", grey)
    write_idx(root / "train-labels-idx1-ubyte", LABELS.astype(np.uint8))
    return DataConfig(path=str(root), image_size=28)


def fashion_mnist(root: Path, seed: int) -> DataConfig:
    return DataConfig(
        source="fashion-mnist", path=idx(root / "FashionMNIST", seed).path, image_size=28
    )


def npz(root: Path, seed: int) -> DataConfig:
    file = root / "set.npz"
    np.savez(file, images=pixels(seed), labels=LABELS, class_names=["cat", "dog"])
    return DataConfig(path=str(file), image_size=8)


def webdataset(root: Path, seed: int) -> DataConfig:
    images = pixels(seed)
    for shard in range(2):
        members = {}
        for number in range(6 * shard, 6 * shard + 6):
            members[f"./{seed}_{number:02d}.cls"] = str(LABELS[number]).encode()
            members[f"./{seed}_{number:02d}.png"] = png(images[number])
        write_tar(root / f"train-{shard}.tar", members)
    return DataConfig(path=str(root), image_size=8)


def digits(root: Path, seed: int) -> DataConfig:
    return DataConfig(source="digits", split="held-out" if seed else "train", image_size=8)


BUILDERS = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "folder": folder,
    "huggingface": huggingface,
    "idx": idx,
    "npz": npz,
    "webdataset": webdataset,
}
