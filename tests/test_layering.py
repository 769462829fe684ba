"""Imports point one way: from the commands down to the ground floor (design, section 1)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sit_vit5"

# Top to bottom; a module imports from floors below and from its own package.
FLOORS = [
    {"__main__"},
    {"commands"},
    {"analysis"},
    {"evaluation"},
    {"interop"},
    {"sampling", "training"},
    {"data"},
    {"models", "flow", "codecs", "metrics", "report"},
    {"config"},
    {"utils"},
]
# Imports that answer --help and wrong options.
LIGHT = (
    "commands",
    "config",
    "config.parse",
    "config.presets",
    "utils.distributed",
    "utils.errors",
    "utils.files",
    "utils.memory",
    "utils.power_ema",
    "utils.rng",
    "utils.run_folder",
    "commands.train",
    "commands.encode",
    "commands.evaluate",
    "commands.export",
    "commands.posthoc_ema",
)


def floor(name: str) -> int:
    (found,) = [number for number, floor in enumerate(FLOORS) if name in floor]
    return found


def imports() -> list[tuple[str, str, str]]:
    """File, its package and the package that it imports, for every import of our own."""
    edges = []
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
                if node.module == "sit_vit5":
                    modules = [f"sit_vit5.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            edges += [
                (str(file.relative_to(PACKAGE)), own, module.split(".")[1])
                for module in modules
                if module.startswith("sit_vit5.") and module != "sit_vit5.__version__"
            ]
    return edges


def test_every_import_points_down_or_stays_in_its_package():
    assert len(imports()) > 100
    upward = {
        (file, target)
        for file, own, target in imports()
        if own != target and floor(target) <= floor(own)
    }
    assert upward == set()


def test_metrics_need_utils_alone():
    assert {target for _, own, target in imports() if own == "metrics"} == {"metrics", "utils"}


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_do_not_import_torch(name):
    code = f"import sys, sit_vit5.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
