"""IDX files, the format of MNIST and Fashion-MNIST: a header and plain bytes, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from sit_vit5.data.image_source import ArrayImages, number_classes
from sit_vit5.data.images import BadImage
from sit_vit5.errors import UserError, choose
from sit_vit5.files import check_regular_file

UNSIGNED_BYTE = 8  # the header's code
GZIP = b"\x1f\x8b"
# What the file names of a split contain.
SPLITS = {"train": ("train",), "test": ("t10k", "test")}

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
FASHION_HUB = "zalando-datasets/fashion_mnist"


class IdxImages(ArrayImages):
    """Grey images (1, S, S) in memory; cropped after ADM where their size is not `image_size`.

    The 28 pixels of MNIST need no padding: patches of 2 and 4 divide them.
    """

    def __init__(
        self,
        source: str,
        images: np.ndarray,
        labels: np.ndarray | None,
        *,
        where: str,
        class_names: tuple[str, ...] | None,
        image_size: int,
    ):
        """images: uint8 (N, H, W). labels: (N,) or None. class_names None: the labels' numbers."""
        digest = hashlib.sha256(images)
        if labels is None:
            class_names = ()
        else:
            digest.update(labels)
            if class_names is None:
                labels, class_names = number_classes(labels, where)
        super().__init__(
            source,
            images[..., None],
            where=where,
            labels=labels,
            class_names=class_names,
            image_size=image_size,
            digest=digest.hexdigest(),
        )


def open_idx(
    path: Path,
    image_size: int,
    *,
    split: str = "train",
    unconditional: bool = False,
    source: str = "idx",
    class_names: tuple[str, ...] | None = None,
) -> IdxImages:
    """A file of images, its labels beside it; or those of a split in a folder."""
    file = find_images(path, split) if path.is_dir() else path
    check_regular_file(file, remedy="give the file of the images")
    images, labels = read_idx(file, dimensions=3), None
    if not images.size:
        raise UserError(f"{file} holds no image: {images.shape} (count, height, width)")
    if not unconditional:
        labels_file = labels_of(file)
        check_regular_file(labels_file, remedy="fetch it again")
        labels = read_idx(labels_file, dimensions=1)
        if len(labels) != len(images):
            raise UserError(f"{labels_file} holds {len(labels)} labels for {len(images)} images")
    return IdxImages(
        source, images, labels, where=str(file), class_names=class_names, image_size=image_size
    )


def open_fashion_mnist(
    path: str | None, image_size: int, *, split: str = "train", unconditional: bool = False
) -> IdxImages:
    """Fashion-MNIST from a path, from Debian's package, or from the Hugging Face hub."""
    if path is None and not FASHION_FOLDER.is_dir():
        images, labels = fashion_from_hub(split)
        return IdxImages(
            "fashion-mnist",
            images,
            None if unconditional else labels,
            where=f"{FASHION_HUB}, {split}",
            class_names=FASHION_CLASSES,
            image_size=image_size,
        )
    return open_idx(
        FASHION_FOLDER if path is None else Path(path),
        image_size,
        split=split,
        unconditional=unconditional,
        source="fashion-mnist",
        class_names=FASHION_CLASSES,
    )


def fashion_from_hub(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (N, 28, 28) and labels uint8 (N,), equal to those of the IDX files."""
    from sit_vit5.data.huggingface import open_hugging_face

    try:
        source = open_hugging_face(FASHION_HUB, 28, split=split)
        # Grey as RGB: the three channels are one.
        grey = [np.asarray(source.picture(index))[..., 0] for index in range(len(source))]
    except (UserError, BadImage) as error:
        raise UserError(
            f"Fashion-MNIST is neither in {FASHION_FOLDER} nor to be had from the hub ({error}); "
            "install Debian's package (apt-get install dataset-fashion-mnist), or give the folder "
            "of its IDX files by --data.path"
        ) from None
    return np.stack(grey), source.labels.astype(np.uint8)


def find_images(folder: Path, split: str) -> Path:
    """The images of a split; of a file and its gzipped copy the file."""
    words = choose("data.split", split, SPLITS)
    there = sorted(folder.glob("*idx3-ubyte*"))
    found = {file.name.removesuffix(".gz"): file for file in reversed(there)}
    found = [file for name, file in found.items() if any(word in name for word in words)]
    if len(found) != 1:
        names = ", ".join(file.name for file in there) or "none"
        raise UserError(
            f"{folder} holds {len(found)} files of images of the split {split} (IDX files: "
            f"{names}); give one file by --data.path"
        )
    return found[0]


def labels_of(images: Path) -> Path:
    """train-labels-idx1-ubyte for train-images-idx3-ubyte, gzipped or not."""
    plain = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for name in (plain, f"{plain}.gz"):
        if images.with_name(name).exists() and name != images.name:
            return images.with_name(name)
    raise UserError(
        f"{images} has no labels {plain} beside it; put them there, or train without classes "
        "(--data.unconditional True)"
    )


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """The array of an IDX file: 0, 0, type, number of dimensions; sizes (big-endian); bytes."""
    content = _content(path)
    magic, start = bytes((0, 0, UNSIGNED_BYTE, dimensions)), 4 + 4 * dimensions
    if content[:4] != magic:
        raise UserError(
            f"{path} begins with {content[:4].hex() or 'nothing'}, not {magic.hex()}: no IDX file "
            f"of bytes in {dimensions} dimensions"
        )
    sizes = np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4").tolist()
    if len(content) != start + math.prod(sizes):
        raise UserError(
            f"{path} holds {max(len(content) - start, 0)} bytes, its header says {sizes}; fetch it "
            "again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} is cut short or damaged ({error}); fetch it again") from None
