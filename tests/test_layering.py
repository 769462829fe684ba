"""Imports point one way: from the commands down to the ground floor (design, section 1)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sit_vit5"

# Top to bottom; a module imports from floors below, and from its own package. A command inside a
# package stands by itself, far above it.
FLOORS = [
    {"export", "calibration"},
    {
        "convert",
        "posthoc_ema",
        "plan",
        "pipeline",
        "sweep",
        "likelihood",
        "reconstruction",
        "online_evaluation",
        "data.encode",
        "data.inspect",
    },
    {"training", "evaluation", "sampling"},
    {"disk"},
    {"checkpoint", "snapshots"},
    {"data", "codecs", "metrics", "flow", "models"},
    {"cli"},
    {
        "arrays",
        "tensors",
        "config",
        "presets",
        "recipes",
        "rng",
        "distributed",
        "run_folder",
        "precision",
        "power_average",
        "published",
        "files",
        "memory",
        "errors",
        "page",
        "progress",
        "streams",
        "fields",
        "flags",
        "yaml_options",
    },
]
LIGHT = (
    "config",
    "presets",
    "recipes",
    "cli",
    "run_folder",
    "distributed",
    "errors",
    "fields",
    "files",
    "flags",
    "memory",
    "rng",
    "plan.options",
    "export",
    "power_average",
    "posthoc_ema",
    "data.encode",
)


def floor(name: str) -> int:
    (found,) = [number for number, floor in enumerate(FLOORS) if name in floor]
    return found


def standing(module: str) -> str:
    """The name under which a module has its floor: its package's, unless it has one itself."""
    own = [name for floor in FLOORS for name in floor if f"{module}.".startswith(f"{name}.")]
    return max(own, key=len) if own else module.split(".")[0]


def imports() -> list[tuple[str, str, str]]:
    found = []
    for file in PACKAGE.rglob("*.py"):
        own = standing(".".join(file.relative_to(PACKAGE).with_suffix("").parts))
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "sit_vit5":
                    modules = [f"sit_vit5.{alias.name}" for alias in node.names]
                else:
                    modules = [node.module]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                if module.startswith("sit_vit5.") and module != "sit_vit5.__version__":
                    found.append((str(file), own, standing(module.removeprefix("sit_vit5."))))
    return found


def test_every_import_points_down_or_stays_in_its_package():
    assert len(imports()) > 100
    upward = [
        (file, target)
        for file, own, target in imports()
        if own != target
        and (
            floor(target) < floor(own)
            or (floor(target) == floor(own) and floor(own) < len(FLOORS) - 1)
        )
    ]
    assert not upward


def test_metrics_need_neither_models_nor_sampling():
    targets = {target for _, own, target in imports() if own == "metrics"}
    floor = {"arrays", "tensors", "errors", "files", "memory", "precision", "progress"}
    assert targets <= floor | {"metrics"}


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_do_not_import_torch(name):
    code = f"import sys, sit_vit5.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
