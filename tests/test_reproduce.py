"""docs/reproduce.md and the configurations' headers: commands dry-run in order, numbers checked."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import ROOT
from test_readme import PARSERS
from test_recipes import IMAGENET, header, stem

from sit_vit5.analysis.cost import denoiser_cost
from sit_vit5.analysis.plan_report import duration
from sit_vit5.codecs.autoencoder import AUTOENCODERS
from sit_vit5.config import (
    CalibrateConfig,
    EncodeConfig,
    GenerateConfig,
    InspectConfig,
    MetricsConfig,
    TrainConfig,
)
from sit_vit5.config.flags import options_of
from sit_vit5.config.parse import TrainCommand, dump_config, load_config
from sit_vit5.config.plan import DEVICES, PlanCommand
from sit_vit5.report.published import paper_name, published, rival
from sit_vit5.sampling.load import resolve

PAGE = (ROOT / "docs/reproduce.md").read_text()
# Programs other than ours that the page starts.
FOREIGN = ("pip ", "python -m venv ", "python -c ", "mkdir ", "for ", "export ")
CLASSES = tuple(f"n{number:08d}" for number in range(1000))


def shell_lines(text: str, indent: int) -> list[str]:
    """The shell's lines in the indented blocks of a text, continued ones joined."""
    found, before, inside = [], "", False
    for line in text.replace("\\\n", " ").splitlines():
        own = re.match(rf" {{{indent}}}(\S.*)$", line)
        inside = bool(own) and (inside or not before)  # else a paragraph of a list
        if inside:
            found.append(own[1])
        before = line.strip()
    return found


@dataclass
class Rehearsal:
    """What earlier commands have made: files and folders, and runs by their folders."""

    made: set[str] = field(default_factory=lambda: {"IMAGENET/train"})
    runs: dict[str, TrainConfig] = field(default_factory=dict)

    def play(self, line: str) -> None:
        """Parses a command as its launcher and the command itself do, and checks its inputs."""
        script, argv = unlaunched(shlex.split(line))
        options = PARSERS[script](argv)
        if script == "encode":
            assert options.data.path in self.made
            self.made.add(options.out)
        elif script == "train_sit.py":
            self.train(*options)
        elif script == "sample/generate.py":
            self.generate(options)
        elif script == "evaluate/metrics.py":
            assert options.samples in self.made
            assert options.reference == CalibrateConfig().reference
        elif script == "inspect":
            assert options.data.path in self.made
        elif script == "evaluate/calibrate.py":
            assert options == CalibrateConfig(num_samples=options.num_samples, out=options.out)
        else:
            assert script in ("plan", "convert")

    def train(self, config: TrainConfig, checkpoint: Path | None) -> None:
        """A run's folder with a checkpoint, as far as the command line reads it."""
        assert config.data.path in self.made
        run = Path(config.output_dir) / config.name
        assert (str(run) in self.runs) == (checkpoint is not None)
        self.runs[str(run)] = config
        folder = run / "checkpoints/step_0000001"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text("{}")
        (run / "config.yaml").write_text(dump_config(config))
        (run / "latest").write_text(folder.name)

    def generate(self, options) -> None:
        """A set of samples; the step of its checkpoint must be one that the run keeps for good."""
        run, _, step = options.checkpoint.partition("/checkpoints/step_")
        config = self.runs[run]
        if step:
            assert int(step) <= config.steps
            assert int(step) % config.checkpoint.milestone_every == 0
        settings = resolve(options, config.objective, class_names=CLASSES, channels=4)
        assert (settings.method, settings.steps) == ("euler_maruyama", 250)
        assert settings.precision == "tf32" and options.num_samples == 50_000
        assert (settings.guidance.scale, settings.guidance.channels) in ((1, None), (1.5, 3))
        if settings.guidance.scale == 1:
            assert config.steps == 400_000 or step  # published values without guidance are early
        self.made.add(f"{options.out}/samples.npz")


def unlaunched(words: list[str]) -> tuple[str, list[str]]:
    """Script and arguments, as the launcher tells them apart."""
    if words[0] == "python":
        start = 3 if words[1] == "-m" else 1
        assert start == 1 or words[2] == "sit_vit5"
        return words[start], words[start + 1 :]
    from accelerate.commands.launch import launch_command_parser

    assert words[:2] == ["accelerate", "launch"]
    launcher = launch_command_parser().parse_args(words[2:])
    assert Path(launcher.config_file).is_file()
    words = [launcher.training_script, *launcher.training_script_args]
    assert bool(launcher.module) == (words[0] == "sit_vit5")
    return unlaunched(["python", "-m", *words] if launcher.module else ["python", *words])


@pytest.fixture(autouse=True)
def _beside_the_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "sample", "evaluate", "train_sit.py"):
        (tmp_path / name).symlink_to(ROOT / name)


def test_every_command_of_the_page_can_follow_those_before_it():
    lines = shell_lines(PAGE, 4)
    own = [line for line in lines if not line.startswith(FOREIGN)]
    assert len(own) >= 16 and len(lines) - len(own) >= 6
    rehearsal = Rehearsal()
    for line in own:
        rehearsal.play(line)
    assert len(rehearsal.runs) == 2


@pytest.mark.parametrize("path", IMAGENET, ids=stem)
def test_every_command_of_a_header_can_follow_those_before_it(path):
    rehearsal, lines = Rehearsal(), shell_lines(header(path), 2)
    assert len(lines) >= 5
    for line in lines:
        rehearsal.play(line)
    assert list(rehearsal.runs) == [f"runs/{load_config(path).name}"]


def test_the_blocks_of_the_page_are_bash():
    text = "\n".join(shell_lines(PAGE, 4))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_every_option_that_the_page_names_exists():
    commands = (TrainCommand, GenerateConfig, MetricsConfig, CalibrateConfig, EncodeConfig,
                InspectConfig, PlanCommand)  # fmt: skip
    known = {name for command in commands for name in options_of(command, whole=TrainConfig)}
    launchers = {"num_processes", "nproc_per_node", "config_file"}
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][\w.-]*\w)", PAGE)}
    assert len(named) > 20 and named <= known | launchers


def test_the_files_of_the_page_are_those_that_the_commands_look_for():
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    options = CalibrateConfig()
    for name in (
        options.reference, options.adm_samples, options.weights,
        URL_INCEPTION_V3.rsplit("/", 1)[1], AUTOENCODERS[options.codec.name][0],
    ):  # fmt: skip
        assert f"| `{name}` |" in PAGE


def test_the_table_of_the_page_is_the_published_one():
    head = re.search(r"^\| FID-50K without guidance \|(.*)\|$", PAGE, re.MULTILINE)
    steps = [1000 * int(cell.strip(" k")) for cell in head[1].split("|")]
    for model, curve in published().curves.items():
        row = re.search(rf"^\| {paper_name(model)} \|(.*)\|$", PAGE, re.MULTILINE)
        cells = [cell.strip() for cell in row[1].split("|")]
        shown = {step: float(cell) for step, cell in zip(steps, cells, strict=True) if cell != "-"}
        assert shown == curve, model


def test_a_go_is_nearer_to_vit5_than_to_sit():
    for model, step, words in (
        ("ViT5-S/2", 400_000, r"below ([\d.]+) for S"),
        ("ViT5-B/2", 400_000, r"and ([\d.]+) for B"),
        ("ViT5-XL/2", 200_000, r"\*\*Go\*\* below ([\d.]+)\."),
    ):
        limit = float(re.search(words, PAGE)[1].rstrip("."))
        middle = (published().curves[model][step] + published().curves[rival(model)][step]) / 2
        assert middle - 0.1 <= limit <= middle, model
    gaps = {
        step: fid - published().curves["ViT5-XL/2"][step]
        for step, fid in published().curves["SiT-XL/2"].items()
    }
    assert max(gaps, key=gaps.get) == 200_000


def test_what_calibration_expects_is_on_the_page():
    expected = published()
    rows = {
        "ADM's samples, FID": expected.evaluator["frechet_distance"],
        "sFID": expected.evaluator["spatial_frechet_distance"],
        "Inception Score": expected.evaluator["inception_score"],
        "SiT-XL/2, one of the three samplers, FID": expected.sampler,
    }
    for title, entry in rows.items():
        assert f"| {title} | {entry.value:g} | {entry.tolerance:g} |" in PAGE
    both = (expected.evaluator["precision"], expected.evaluator["recall"])
    assert f"| precision, recall | {both[0].value:g}, {both[1].value:g} | 0.01 |" in PAGE
    assert {entry.tolerance for entry in both} == {0.01}


def planned(size: str, steps: int) -> str:
    """Time of a run's FLOPs on 8 H200 at 40% of their peak."""
    config = load_config(ROOT / f"configs/imagenet256_vit5_{size}.yaml")
    cost = denoiser_cost(config.backbone, in_channels=4, input_size=(32, 32), num_classes=1000)
    seconds = 3 * cost.flops * config.batch_size / (8 * 0.4 * 1e12 * DEVICES["h200"].bf16)
    return duration(steps * seconds)


def test_times_of_the_page_are_the_plans():
    assert f"at 200k steps, {planned('xl', 200_000)} in on 8 H200" in PAGE
    assert planned("s", 400_000) == "19.9 minutes"
    assert f"20 minutes or {planned('b', 400_000)} on 8 H200" in PAGE
