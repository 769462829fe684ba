"""Weight files: the values they may hold, and one line for every other file."""

from __future__ import annotations

import argparse
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import new_folder
from sit_vit5.utils.tensors import read_tensors, read_weights, write_tensors

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 334643276\n"


def test_both_formats_read_back_whatever_the_suffix(tmp_path):
    tensors = {"a": torch.randn(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.pt")
    torch.save(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "old", _use_new_zipfile_serialization=False)
    # A header of 128 bytes: the file starts as a pickle does.
    save_file({"a": tensors["a"], "b" * 10: tensors["b"]}, tmp_path / "128.safetensors")
    assert (tmp_path / "128.safetensors").read_bytes()[0] == 128
    assert len(read_tensors(tmp_path / "128.safetensors", remedy="")) == 2
    for name in ("x.pt", "x.safetensors", "old"):
        found = read_tensors(tmp_path / name, remedy="")
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        assert found["b"].dtype == torch.bfloat16


def test_a_training_checkpoint_keeps_its_plain_values(tmp_path):
    torch.save({"epoch": 3, "args": argparse.Namespace(lr=0.1)}, tmp_path / "x.pth")
    assert read_weights(tmp_path / "x.pth", remedy="")["args"].lr == 0.1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.pt", LFS, "pointer of Git LFS, not the file; fetch it with git lfs pull"),
        ("x.safetensors", LFS, "pointer of Git LFS, not the file; fetch it with git lfs pull"),
        (
            "x.pth",
            b"\n <!DOCTYPE html><html>",
            "a web page, not the file; download the file itself",
        ),
        ("x.pt", b"", "it is empty; ADVICE"),
        ("x.pt", b"Entry not found", "no safetensors or torch file; is it a web page"),
        ("x.pt", b"PK\x03\x04" + bytes(99), "no torch file, or damaged; ADVICE"),
        ("x.pt", b"\x80\x02rubbish", "no torch file, or damaged; ADVICE"),
        ("x.pt", pickle.dumps({"a": [1]}), "more than plain tensors and was not executed"),
        ("x.pt", b"\x80rubbish", "x.pt cannot be read: .*; ADVICE"),
        ("x.safetensors", b"\xff" * 8 + b"{}", "no safetensors or torch file"),
        ("x.safetensors", bytes(8) + b"{", "x.safetensors cannot be read: .*; ADVICE"),
    ],
)
def test_files_that_hold_no_weights_are_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason) as error:
        read_tensors(tmp_path / name, remedy="ADVICE")
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


def test_pipes_folders_and_missing_files_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name, reason in {"pipe": "a pipe", "folder": "a folder", "gone": "No such file"}.items():
        with pytest.raises(UserError, match=rf"{name}.pt cannot be read: .*{reason}.*; ADVICE"):
            read_tensors(tmp_path / f"{name}.pt", remedy="ADVICE")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_programs_are_refused_without_advice_to_run_them(tmp_path):
    torch.jit.script(torch.nn.Identity()).save(tmp_path / "script.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    for name, reason in {"script": "TorchScript", "module": r"torch.nn.*not executed"}.items():
        with pytest.raises(UserError, match=reason) as error:
            read_tensors(tmp_path / f"{name}.pt", remedy="")
        assert "weights_only" not in str(error.value)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.bool), "is bool, not float32, float16"),
        (torch.ones(2, dtype=torch.int64), "is int64, not"),
        (torch.ones(2, dtype=torch.complex64), "is complex64, not"),
        (torch.ones(2).to(torch.float8_e4m3fn), "is float8_e4m3fn, not"),
        (torch.eye(2).to_sparse(), "is sparse"),
        (torch.ones(2, device="meta"), "without numbers"),
        (torch.ones(1).expand(10**12), "repeats its numbers"),
        (torch.tensor([1.0, float("nan")]), "is not finite"),
        (torch.tensor(float("inf")), "is not finite"),
        (3, "is not a tensor"),
    ],
)
def test_unusable_tensors_are_refused_by_name(tmp_path, tensor, reason):
    torch.save({"good": torch.ones(2), "head.bias": tensor}, tmp_path / "x.pt")
    with pytest.raises(UserError, match=rf"x.pt cannot be used: head.bias .*{reason}.*; ADVICE"):
        read_tensors(tmp_path / "x.pt", remedy="ADVICE")


def test_types_are_those_asked_for(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.float64)}, tmp_path / "x.safetensors")
    assert read_tensors(tmp_path / "x.safetensors", remedy="")["a"].dtype == torch.float64
    with pytest.raises(UserError, match="a is float64, not float32"):
        read_tensors(tmp_path / "x.safetensors", dtypes=(torch.float32,), remedy="")


def test_views_are_written_whole(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    write_tensors(tmp_path / "x.safetensors", {"t": whole.T, "row": whole[1]})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["t"], whole.T) and torch.equal(found["row"], whole[1])


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    import resource

    tensors, limits = {"a": torch.zeros(10_000)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*new: File too large.*free disk space"):
            with new_folder(tmp_path / "new") as partial:
                partial.mkdir()
                write_tensors(partial / "x.safetensors", tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
