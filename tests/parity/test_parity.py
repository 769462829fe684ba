"""Our numbers against the official implementations': `pytest tests/parity --golden DIR`.

Sizes and options come from each fixture's JSON. Tolerances are the fixture's own.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file


def test_golden(golden_file: Path, checks_of, record_property) -> None:
    facts = json.loads(golden_file.read_text())
    tensor_file = golden_file.with_suffix(".safetensors")
    tensors = load_file(tensor_file) if tensor_file.exists() else {}
    failures, compared = [], 0
    for check in checks_of(facts, tensors, golden_file.parent):
        name = f"{facts['fixture']}: {check.name}"
        # Plain numbers: pytest-xdist cannot send NumPy's from one process to another.
        record_property("parity", (name, float(check.error), float(check.tolerance)))
        compared += 1
        if not check.error <= check.tolerance:  # also catches NaN
            failures.append(f"{name}: error {check.error:.3e} > tolerance {check.tolerance:.3e}")
    assert not failures, "\n".join(failures)
    assert compared, "the fixture holds nothing that was compared"
