"""Files to uint8 RGB arrays, and ADM's centre crop: the one place where a file becomes pixels."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from sit_vit5.utils.errors import UserError, listed
from sit_vit5.utils.files import placeholder

# Formats that are read, by Pillow's names, and the extensions of their files. Others are left out:
# EPS would start a foreign program, TGA and PCX have no magic number, PFM holds floats.
_FORMATS = {
    "PNG": (".png", ".apng"),
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "QOI": (".qoi",),
}
_PARTS_OF_PILLOW = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}  # may be missing
FORMATS = tuple(
    name
    for name in _FORMATS
    if name not in _PARTS_OF_PILLOW or features.check(_PARTS_OF_PILLOW[name])
)
EXTENSIONS = tuple(extension for name in FORMATS for extension in _FORMATS[name])
MAX_PIXELS = 178_956_970  # of one image; where Pillow stops decoding


class BadImage(Exception):
    """An image that cannot be decoded. path: its file, or where else it lies."""

    def __init__(self, path: Path | str, reason: str):
        super().__init__(path, reason)  # both, so that it survives the way from a worker process
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        # Names need not be UTF-8, reasons need not be one line.
        path = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        return " ".join(f"{path}: cannot be decoded ({self.reason})".split("\n"))


def refusal(reason: object) -> UserError:
    """What stops a command that skips no bad image. reason: the BadImage, or its text."""
    return UserError(f"{reason}; remove the file, or use --data.on-bad-image skip")


def is_image_name(name: str) -> bool:
    """Whether a file's name, without its folders, is that of an image; not of hidden ones."""
    return name[:1] != "." and name.lower().endswith(EXTENSIONS)


def kinds_passed_over(names: Iterable[str]) -> Counter[str]:
    """Kinds of the files that are no images, by extension; hidden files are not counted.

    names: without their folders.
    """
    others = (name for name in names if name[:1] != "." and not is_image_name(name))
    return Counter(Path(name).suffix.lower() or "without extension" for name in others)


def describe_passed_over(kinds: Counter[str]) -> str:
    """ "6 files passed over: 2 .avif, 4 .txt"; empty without any."""
    total = kinds.total()
    if not total:
        return ""
    named = listed((f"{count:,} {kind}" for kind, count in kinds.most_common()), most=4)
    return f"{total:,} file{'s' if total > 1 else ''} passed over: {named}"


@dataclass(frozen=True)
class Header:
    """What a file says of itself before it is decoded. format: Pillow's name, such as PNG; grey:
    whether its three channels will be equal."""

    width: int
    height: int
    format: str
    grey: bool


def read_header(file: Path | BinaryIO, name: str | None = None) -> Header:
    """Size and format, without the pixels. name: as for `read_rgb`."""
    with _opened(file, name) as image:
        grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
        return Header(*image.size, str(image.format), grey)


def read_rgb(file: Path | BinaryIO, name: str | None = None) -> Image.Image:
    """The image in RGB as stored: alpha is dropped and EXIF orientation not applied (as ADM).

    name: what BadImage calls the image; needed for a stream. Refuses more than MAX_PIXELS.
    """
    with _opened(file, name) as image:
        image.load()
        return to_rgb(image)


@contextmanager
def _opened(file: Path | BinaryIO, name: str | None) -> Iterator[Image.Image]:
    """An image file before it is decoded; BadImage for whatever goes wrong with it."""
    try:
        if isinstance(file, Path) and file.is_fifo():
            raise ValueError("it is a pipe")  # to open it would wait for ever
        with warnings.catch_warnings():
            # One per image would flood the log: of broken EXIF, which is not used, of palettes,
            # and of images that are large but below the limit.
            warnings.filterwarnings("ignore", module="PIL")
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except UnidentifiedImageError:  # its message holds the address of a stream
        reason = "; ".join(placeholder(_start(file)) or ["cannot identify image file"])
        raise BadImage(name or file, reason) from None
    except Exception as error:  # Pillow's decoders raise a dozen types on broken files
        raise BadImage(name or file, str(error) or type(error).__name__) from None


def _start(file: Path | BinaryIO) -> bytes:
    """The first bytes."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            return stream.read(512)
    file.seek(0)
    return file.read(512)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB. 16-bit greys are scaled: Pillow's own conversion clips them to white."""
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65535:
            raise ValueError(f"grey values {grey.min()}..{grey.max()} are outside 16 bits")
        return Image.fromarray((grey // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point image; save it as 8- or 16-bit")
    return image.convert("RGB")


def center_crop(image: Image.Image, size: int) -> np.ndarray:
    """ADM's crop, uint8 (size, size, 3): halve by box while twice too large, bicubic, centre.

    Of a grey image (size, size). Dhariwal and Nichol (2021), guided-diffusion's
    `center_crop_arr`; DiT and SiT use the same.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image)[top : top + size, left : left + size]
