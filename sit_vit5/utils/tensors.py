"""Weights on disk: safetensors and PyTorch files, read without running code, checked by name."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sit_vit5.utils.errors import UserError, brief, listed
from sit_vit5.utils.files import check_regular_file, damaged, sync

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def read_tensors(
    path: Path, *, dtypes: Collection[torch.dtype] = FLOATS, remedy: str
) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, checked by `check_values`."""
    return check_values(read_weights(path, remedy=remedy), path, dtypes=dtypes, remedy=remedy)


def read_shapes(path: Path, *, remedy: str) -> dict[str, Tensor]:
    """Names and shapes in a safetensors file, as meta tensors."""
    check_regular_file(path, remedy=remedy)
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: torch.empty(file.get_slice(name).get_shape(), device="meta")
                for name in file.keys()
            }
    except (OSError, SafetensorError) as error:
        raise UserError(damaged(path, _reason(error), remedy)) from None


def read_diffusers(folder: Path, *, remedy: str) -> dict[str, Tensor]:
    """The weights in a model's folder of diffusers, checked by `check_values`.

    Empty if it has no safetensors file of the usual name, such as one of half precision alone.
    """
    whole = folder / "diffusion_pytorch_model.safetensors"
    parts = sorted(folder.glob("diffusion_pytorch_model-*-of-*.safetensors"))
    files = [whole] if whole.exists() else parts
    return {k: t for file in files for k, t in read_tensors(file, remedy=remedy).items()}


def read_weights(path: Path, *, remedy: str) -> object:
    """The content of a weights file: tensors by name, or a training checkpoint's nested values.

    The first bytes tell the format, not the name. A PyTorch file may hold plain values and tensors
    only, and a Namespace, in which DiT's, SiT's and timm's trainers store their options.
    remedy: advice for a damaged file, such as "convert it again".
    """
    check_regular_file(path, remedy=remedy)
    with path.open("rb") as file:
        start = file.read(9)
    is_safetensors = start[4:] == b"\0\0\0\0{"  # after the length of the header, below 100 MB
    if not is_safetensors and not start.startswith((b"PK\x03\x04", b"\x80")):  # zip; a pickle
        reason = "it is no safetensors or torch file; is it a web page, or a pointer of Git LFS?"
        raise UserError(damaged(path, reason, remedy))
    try:
        if is_safetensors:
            return load_file(path, device="cpu")
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with path.open("rb") as file:  # by its path torch goes by the suffix
                return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign or damaged file raises a dozen types
        if isinstance(error, pickle.UnpicklingError):
            remedy = "save its state dict alone"
        raise UserError(damaged(path, _reason(error), remedy)) from None


def check_values(
    tensors: object, source: object, *, dtypes: Collection[torch.dtype] = FLOATS, remedy: str
) -> dict[str, Tensor]:
    """The same tensors by name.

    Refuses, with the names, sparse and meta tensors, types not in `dtypes`, and numbers that are
    not finite.
    """
    if not (isinstance(tensors, dict) and tensors and all(isinstance(n, str) for n in tensors)):
        raise UserError(damaged(source, "it holds no tensors by name", remedy))
    refused = [
        (reason, name) for name, tensor in tensors.items() if (reason := _odd(name, tensor, dtypes))
    ]
    if not refused:
        refused = [("not finite", name) for name, t in tensors.items() if not t.isfinite().all()]
    if refused:
        reason = refused[0][0]
        names = [name for other, name in refused if other == reason]
        verb, advice = "are" if len(names) > 1 else "is", f"; {remedy}" if remedy else ""
        raise UserError(f"{source} cannot be used: {listed(names, most=3)} {verb} {reason}{advice}")
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file and forces it to the disk; raises OSError if there is no room."""
    with writing():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    sync(path)


@contextmanager
def writing() -> Iterator[None]:
    """Turns what safetensors raises on a full disk into an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(_reason(error)) from None


def _odd(name: str, tensor: object, dtypes: Collection[torch.dtype]) -> str:
    """A reason against a tensor before its numbers are read; "" if there is none."""
    if not isinstance(tensor, Tensor):
        return "not a tensor"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "sparse or quantized"
    if tensor.is_meta:
        return "without numbers (a meta tensor)"
    counter = name.endswith("num_batches_tracked")  # BatchNorm's, an integer
    if tensor.dtype not in dtypes and not (counter and tensor.dtype == torch.int64):
        return f"{_name(tensor.dtype)}, not {', '.join(map(_name, dtypes))}"
    # A view that repeats its numbers may claim any size.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "a view that repeats its numbers"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: Exception) -> str:
    """An error in one line, without PyTorch's advice to run the code in the file."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", text)
        held = f" ({found[1]})" if found else ""
        return f"it holds more than plain tensors{held} and was not executed"
    if "TorchScript" in text:
        return "it is a TorchScript program, not weights"
    if isinstance(error, (SafetensorError, OSError)) or "memory" in text:
        return re.sub(
            r"^(Error while [\w ]+: )?(I/O error: )?| \(os error \d+\)$", "", brief(error)
        )
    return "it is no torch file, or damaged"
