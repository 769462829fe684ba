"""Collects the fixtures of a golden folder and prints every comparison."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
from checks import CHECKS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_file" not in metafunc.fixturenames:
        return
    folder = Path(metafunc.config.getoption("--golden"))
    files = sorted(
        file for file in folder.glob("*.json") if "fixture" in json.loads(file.read_text())
    )
    if not files:
        raise pytest.UsageError(f"--golden {folder} holds no fixture (*.json with a key 'fixture')")
    metafunc.parametrize("golden_file", files, ids=[file.stem for file in files])


@pytest.fixture
def checks_of(golden_file: Path):
    """The function that compares this fixture with our code, chosen by the fixture's name."""
    fixture = json.loads(golden_file.read_text())["fixture"]
    for pattern, checks in CHECKS.items():
        if fnmatch(fixture, pattern):
            return checks
    pytest.skip(f"nothing in the project computes {fixture} yet")


def pytest_terminal_summary(terminalreporter) -> None:
    """Name, largest error and tolerance of every comparison (with -v), or the closest call."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    for report in reports:
        rows = [value for key, value in report.user_properties if key == "parity"]
        if rows:
            rows.sort(key=lambda row: row[1] / row[2] if row[2] else row[1])
            for name, error, tolerance in rows if terminalreporter.verbosity > 0 else rows[-1:]:
                terminalreporter.write_line(
                    f"parity {name:<64} error {error:.2e}  tolerance {tolerance:.2e}"
                )
