"""Image sources that are arrays: npz archives, IDX files, and the built-in digits."""

from __future__ import annotations

import gzip
import hashlib
import math
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sit_vit5.data.sources import ArrayImages, number_classes
from sit_vit5.data.transforms import BadImage
from sit_vit5.utils import rng
from sit_vit5.utils.arrays import find_member, members
from sit_vit5.utils.errors import UserError, choose, listed, size_text
from sit_vit5.utils.files import check_regular_file

# Names of the arrays, the first found counts.
IMAGES, LABELS, CLASS_NAMES = ("images", "arr_0"), ("labels", "arr_1"), ("class_names",)
MAX_IN_MEMORY = 4 * 10**9  # bytes; a compressed array cannot be mapped


class Npz(ArrayImages):
    """`images` uint8 (N, H, W, 1 or 3) or (N, H, W), `labels` (N,), perhaps `class_names`.

    Images of an uncompressed archive are mapped, not read; those of a compressed one are held in
    memory by every process. Cropped after ADM where their size is not `image_size`.
    """

    def __init__(self, path: str | Path, image_size: int, *, unconditional: bool = False):
        self.path = Path(path)
        images = self._images()
        labels, class_names = (None, ()) if unconditional else self._classes(len(images))
        super().__init__(
            "npz",
            images,
            where=str(path),
            labels=labels,
            class_names=class_names,
            image_size=image_size,
            digest=self._digest(),
        )

    def __getstate__(self) -> dict:
        # A map would travel as its whole content.
        return {key: value for key, value in self.__dict__.items() if key != "images"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.images = self._images()

    def _images(self) -> np.ndarray:
        images = read_array(self.path, member(self.path, IMAGES))
        if images.ndim == 3:
            images = images[..., None]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
            raise UserError(
                f"the images of {self.path} are {images.dtype} {images.shape}; expected uint8 "
                "(N, H, W), (N, H, W, 1) or (N, H, W, 3)"
            )
        if not images.size:
            raise UserError(f"{self.path} holds no image: {images.shape}")
        return images

    def _classes(self, count: int) -> tuple[np.ndarray, tuple[str, ...]]:
        values = read_array(self.path, member(self.path, LABELS))
        if values.shape != (count,):
            raise UserError(f"{self.path} holds labels {values.shape} for {count} images")
        if CLASS_NAMES[0] not in members(self.path) or values.dtype.kind == "U":
            return number_classes(values, str(self.path))
        if values.dtype.kind not in "iu":
            raise UserError(f"the labels of {self.path} are {values.dtype}; expected integers")
        names = read_array(self.path, member(self.path, CLASS_NAMES))
        if names.dtype.kind not in "iuU":
            raise UserError(f"the class names of {self.path} are {names.dtype}; expected texts")
        return values, tuple(str(name) for name in names.reshape(-1))

    def _digest(self) -> str:
        """Of the archive's own checksums: of gigabytes nothing is read."""
        sums = [f"{key} {info.CRC} {info.file_size}" for key, info in members(self.path).items()]
        return hashlib.sha256("\n".join(sorted(sums)).encode()).hexdigest()


def member(path: Path, names: tuple[str, ...]) -> zipfile.ZipInfo:
    """The first array there is of these names."""
    there = members(path)
    for name in names:
        if name in there:
            return there[name]
    hint = ", or train without classes (--data.unconditional True)" if names == LABELS else ""
    raise UserError(f"{path} holds {listed(there)}; expected {' or '.join(names)}{hint}")


def read_array(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of an npz, mapped if it is stored as it is; pickled objects are refused."""
    found = find_member(path, info)
    if found.start is not None:
        return found.map()
    if found.nbytes > MAX_IN_MEMORY:
        raise UserError(
            f"{found.described} takes {size_text(found.nbytes)} of memory; save it with "
            "np.savez, not compressed: then it is read in place"
        )
    return found.read()


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


HELD_OUT = 360  # a fifth


class Digits(ArrayImages):
    """One of two fixed parts, drawn at random once: `train` (1,437), `held-out` (360)."""

    def __init__(self, split: str, *, image_size: int = 8, unconditional: bool = False):
        if image_size != 8:
            raise UserError(f"data.image_size {image_size} does not fit digits; use 8")
        if split not in ("train", "held-out"):
            raise UserError(f"digits has no split {split!r}; use train or held-out")
        scans, targets = read_scans()
        order = rng.generator(0, "digits split").permutation(len(targets))
        chosen = order[HELD_OUT:] if split == "train" else order[:HELD_OUT]
        grey = np.rint(scans[chosen] * (255 / 16)).astype(np.uint8)  # 17 levels, 0..16
        labels = targets[chosen]
        super().__init__(
            f"digits:{split}",
            grey[..., None],
            where=f"digits:{split}",
            labels=None if unconditional else labels,
            class_names=() if unconditional else tuple(str(digit) for digit in range(10)),
            image_size=image_size,
            digest=hashlib.sha256(grey.tobytes() + labels.tobytes()).hexdigest(),
        )


def read_scans() -> tuple[np.ndarray, np.ndarray]:
    """Levels 0 to 16, fp64 (1797, 8, 8), and digits, int64 (1797,), as `load_digits` gives them.

    Read from scikit-learn's file where it lies where it always did: importing the library takes a
    second, at every start of every command.
    """
    file = Path(*find_spec("sklearn").submodule_search_locations, "datasets/data/digits.csv.gz")
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    scans = load_digits()
    return scans.images, scans.target
