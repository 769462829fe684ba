"""Memory: what cannot fit is refused with the option to lower, what ran out is explained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sit_vit5.config.presets import activation_bytes, backbone, weight_count
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils import memory
from sit_vit5.utils.errors import UserError, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (640, "640 bytes"),
        (999_499, "999 KB"),
        (999_500, "1 MB"),
        (1_240_000_000, "1.24 GB"),
        (2.46e19, "24.6 EB"),
    ],
)
def test_size_is_told_in_the_unit_that_says_most(count, text):
    assert size_text(count) == text


def test_work_beyond_the_free_memory_names_the_option(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    memory.check_memory(10**9, "a batch", use="lower batch_size")
    with pytest.raises(UserError, match="a batch takes 1.5 GB of memory, 1 GB is free; lower"):
        memory.check_memory(15 * 10**8, "a batch", use="lower batch_size")


def test_limits_of_process_and_container_count(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1234567\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "memory.max")
    assert memory.free_memory() == 1234567
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory() > 10**8
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert memory.free_memory() == 0


@pytest.mark.parametrize("name", ["ViT5-B/4", "SiT-XL/2", "LLaMA-S/8"])
def test_bounds_are_below_the_network_and_near_it(name):
    with torch.device("meta"):
        model = Denoiser(backbone(name), in_channels=4, input_size=(32, 32), num_classes=10)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 0.5 * weights < weight_count(backbone(name)) < weights
    side = 32 // backbone(name).patch_size
    hidden = side * side * 4 * backbone(name).width * 4
    assert activation_bytes(backbone(name), (32, 32)) == hidden


def test_failed_allocations_are_told_apart_from_other_errors():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**58, dtype=torch.uint8)
    assert "tried to allocate 288230376151711744 bytes" in memory.out_of_memory(error.value)
    with pytest.raises(MemoryError) as error:
        np.empty(2**58, np.uint8)
    assert "lower what this command takes, such as batch_size" in memory.out_of_memory(error.value)
    assert memory.out_of_memory(RuntimeError("shapes do not match")) is None


@pytest.mark.parametrize("allocate", [lambda: np.empty(10**15), lambda: torch.empty(10**15)])
def test_a_failed_allocation_says_what_to_lower(allocate):
    with pytest.raises(UserError, match="not enough memory: .*; lower --batch-size"):
        with memory.memory_errors("lower --batch-size"):
            allocate()


def test_other_errors_of_the_runtime_pass():
    with pytest.raises(RuntimeError, match="shape"):
        with memory.memory_errors("lower --batch-size"):
            raise RuntimeError("shape")
