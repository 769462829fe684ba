"""The README's commands parse, and what it names exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
from helpers import ROOT

from sit_vit5.commands.models import ListConfig
from sit_vit5.config import (
    REFERENCE_COMMANDS,
    AttentionConfig,
    CalibrateConfig,
    ConvertConfig,
    EncodeConfig,
    ExportConfig,
    GenerateConfig,
    GridConfig,
    InspectConfig,
    InterpolateConfig,
    LikelihoodConfig,
    MetricsConfig,
    PosthocEmaConfig,
    ReconstructionConfig,
    SweepConfig,
    TrajectoryConfig,
)
from sit_vit5.config.parse import parse, parse_over_train, parse_train
from sit_vit5.config.plan import PlanCommand

README = (ROOT / "README.md").read_text()
DOCS = "".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
PARSERS = {
    "train_sit.py": parse_train,
    "sample/grid.py": lambda argv: parse(GridConfig, argv),
    "sample/generate.py": lambda argv: parse(GenerateConfig, argv),
    "evaluate/metrics.py": lambda argv: parse(MetricsConfig, argv),
    "evaluate/reference.py": lambda argv: parse(REFERENCE_COMMANDS[argv[0]], argv[1:]),
    "evaluate/reconstruction.py": lambda argv: parse(ReconstructionConfig, argv),
    "evaluate/calibrate.py": lambda argv: parse(CalibrateConfig, argv),
    "evaluate/sweep.py": lambda argv: parse(SweepConfig, argv),
    "evaluate/likelihood.py": lambda argv: parse(LikelihoodConfig, argv),
    "evaluate/attention.py": lambda argv: parse(AttentionConfig, argv),
    "sample/trajectory.py": lambda argv: parse(TrajectoryConfig, argv),
    "sample/interpolate.py": lambda argv: parse(InterpolateConfig, argv),
    "export": lambda argv: parse(ExportConfig, argv),
    "posthoc-ema": lambda argv: parse(PosthocEmaConfig, argv),
    "convert": lambda argv: parse(ConvertConfig, argv),
    "models": lambda argv: parse(ListConfig, argv),
    "encode": lambda argv: parse(EncodeConfig, argv),
    "inspect": lambda argv: parse(InspectConfig, argv),
    "plan": lambda argv: parse_over_train(PlanCommand, argv),
}


def commands() -> list[tuple[str, list[str]]]:
    """Script and arguments of every command in an indented block of the README and the docs."""
    return commands_in(README + DOCS, indent=4)


def commands_in(text: str, *, indent: int) -> list[tuple[str, list[str]]]:
    """Script and arguments of every command that stands `indent` spaces in."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(rf" {{{indent}}}(python|accelerate|torchrun) (?!-c |-m venv )", line):
            continue
        words = shlex.split(line, comments=True)
        scripts = [word for word in words if word in PARSERS and word.endswith(".py")]
        script = scripts[0] if scripts else words[words.index("sit_vit5") + 1]
        found.append((script, words[words.index(script) + 1 :]))
    return found


def test_there_are_commands_of_every_kind():
    assert {script for script, _ in commands()} == set(PARSERS)


@pytest.mark.parametrize("script, argv", commands(), ids=lambda part: " ".join(part)[:60])
def test_every_command_of_the_readme_parses(script, argv, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    if "--resume" in argv:
        pytest.skip("needs a run; tests/test_commands.py resumes one")
    argv = ["configs/digits.yaml" if word == "MINE.yaml" else word for word in argv]
    assert PARSERS[script](argv)


def test_every_file_the_readme_names_exists_and_no_blank_is_left():
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"(?:configs|tests|sit_vit5|docs)/[\w/.]+\w", README):
        assert (ROOT / path).exists(), path
    assert not re.findall(r"@[A-Z]+@|TODO|TBD", README)


def test_the_demo_and_test_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_clean_removes_what_make_built_and_nothing_else(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = ["runs/digits/latest", "mine/bin/python", "data/a.png"]
    built = [".venv/installed", "build/lib/a.py", "sit_vit5.egg-info/PKG-INFO"]
    for name in kept + built:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    for variables in ([], ["VENV=mine"]):  # an environment that make did not install
        subprocess.run(["make", "clean", *variables], cwd=tmp_path, check=True, capture_output=True)
    assert all((tmp_path / name).exists() for name in kept)
    assert not any((tmp_path / name).parent.exists() for name in built)
