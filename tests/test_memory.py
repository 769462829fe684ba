"""Memory that is lacking: refused before the work, one line during it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sit_vit5.errors import UserError
from sit_vit5.memory import check_memory, free_memory, memory_errors


def test_work_beyond_the_free_memory_is_refused():
    check_memory(10**6, "a million bytes", use="")
    with pytest.raises(UserError, match="ten images take .* GB of memory, .* are free; draw fewer"):
        check_memory(10**15, "ten images", use="draw fewer")


def test_a_limit_of_the_process_counts(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, 1))
    assert free_memory() == 0


@pytest.mark.parametrize("allocate", [lambda: np.empty(10**15), lambda: torch.empty(10**15)])
def test_a_failed_allocation_says_what_to_lower(allocate):
    with pytest.raises(UserError, match="not enough memory: .*; lower --batch-size"):
        with memory_errors("lower --batch-size"):
            allocate()


def test_other_errors_of_the_runtime_pass():
    with pytest.raises(RuntimeError, match="shape"):
        with memory_errors("lower --batch-size"):
            raise RuntimeError("shape")
