"""TF32 is what the configuration says, and nothing else decides a precision."""

from __future__ import annotations

import pytest
import torch

from sit_vit5.config import SamplerConfig
from sit_vit5.sampling.load import load
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.precision import check_launcher, set_precision, set_tf32


@pytest.fixture(autouse=True)
def _tf32_as_before():
    yield
    set_tf32(False)


@pytest.mark.parametrize(("precision", "on"), [("tf32", True), ("fp32", False), ("bf16", False)])
def test_both_switches_are_set_whatever_the_process_did_before(precision, on):
    set_tf32(not on)
    set_precision(precision, torch.device("cuda"))
    assert torch.backends.cuda.matmul.allow_tf32 is on
    assert torch.backends.cudnn.allow_tf32 is on


def test_tf32_without_cuda_is_refused():
    with pytest.raises(UserError, match="tf32 is CUDA's, the device is cpu; use fp32 or bf16"):
        set_precision("tf32", torch.device("cpu"))


def test_sampling_switches_tf32_as_its_precision_says():
    for precision in ("tf32", "fp32"):
        with pytest.raises(UserError, match="nowhere"):
            load(SamplerConfig("nowhere", precision=precision), torch.device("cuda"))
        assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    with pytest.raises(UserError, match="tf32 is CUDA's"):
        load(SamplerConfig("nowhere", precision="tf32"), torch.device("cpu"))


@pytest.mark.parametrize(("launched", "precision"), [("fp16", "tf32"), ("bf16", "fp32")])
def test_a_launchers_other_precision_is_refused(monkeypatch, launched, precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(UserError, match="drop the launcher's flag"):
        check_launcher(precision)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    check_launcher(precision)
