"""The files in configs/: bodies, names and headers say the same; launcher files start a run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from helpers import ROOT, command_environment
from test_readme import PARSERS, commands_in

from sit_vit5.analysis.cost import denoiser_cost
from sit_vit5.analysis.plan_report import duration
from sit_vit5.config import (
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    EmaConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PreviewConfig,
    TrainConfig,
    presets,
)
from sit_vit5.config.parse import differences, load_config
from sit_vit5.config.plan import DEVICES
from sit_vit5.report.published import paper_name, published, rival
from sit_vit5.training.run import parallel
from sit_vit5.utils.distributed import check_plain_launcher

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
IMAGENET = sorted(ROOT.glob("configs/imagenet256_*.yaml"))
LAUNCHERS = sorted(ROOT.glob("configs/accelerate/*.yaml"))
SBATCH = ROOT / "configs/accelerate/slurm.sbatch"
STEPS = {"s": 400_000, "b": 400_000, "l": 400_000, "xl": 7_000_000}
RECIPES = {"vit5": "ViT5", "sit": "SiT", "dit": "DiT"}
# SiT's train.py, every value written out: a changed default must not change a published recipe.
SIT_SETUP = TrainConfig(
    batch_size=256,
    accumulation=1,
    precision="bf16",
    seed=0,
    data=DataConfig(image_size=256, horizontal_flip=True),
    codec=CodecConfig(name="sd-vae-ema"),
    objective=ObjectiveConfig(
        interpolant="linear", prediction="velocity", weights="none", times="uniform", shift=1.0,
        class_dropout=0.1,
    ),
    optimizer=OptimizerConfig(
        lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0, clip_norm=0.0
    ),
    ema=EmaConfig(decays=(0.9999,), warmup=False),
    checkpoint=CheckpointConfig(every=50_000, milestone_every=100_000),
    preview=PreviewConfig(every=50_000),
)  # fmt: skip


def stem(path) -> str:
    return path.stem


def header(path) -> str:
    """The comment at the top of a file, without its marks."""
    lines = path.read_text().splitlines()
    if lines[0].startswith("#!"):
        lines = lines[1:]
    top = lines[: next(i for i, line in enumerate(lines) if not re.match("#( |$)", line))]
    return "\n".join(line[2:] for line in top)


def header_commands(path) -> list[tuple[str, list[str]]]:
    return commands_in(header(path), indent=2)


def parts(path) -> tuple[str, str]:
    """Recipe and size of imagenet256_RECIPE_SIZE.yaml."""
    _, recipe, size = path.stem.split("_")
    return recipe, size


def faults(path, config: TrainConfig) -> list[str]:
    """What a body says other than its file's name."""
    recipe, size = parts(path)
    expected = {
        "model": f"{RECIPES[recipe]}-{size.upper()}/2",
        "name": path.stem.replace("_", "-"),
        "steps": STEPS[size],
        "backbone": presets.backbone(f"{RECIPES[recipe]}-{size.upper()}/2"),
    }
    return [key for key, value in expected.items() if getattr(config, key) != value]


def test_there_is_a_file_for_every_published_number():
    names = {f"imagenet256_{r}_{s}" for r in ("vit5", "sit") for s in STEPS}
    assert {path.stem for path in IMAGENET} == names | {"imagenet256_dit_xl"}


@pytest.mark.parametrize("path", IMAGENET, ids=stem)
def test_model_name_and_steps_are_those_of_the_file_name(path):
    config = load_config(path)
    assert faults(path, config) == []
    assert {"model", "name", "steps"} <= yaml.safe_load(path.read_text()).keys()
    # The check itself: a file that says other than its name is found.
    assert faults(path, replace(config, steps=64_000)) == ["steps"]
    assert faults(path, replace(config, name="other")) == ["name"]


@pytest.mark.parametrize("path", IMAGENET, ids=stem)
def test_all_published_recipes_share_sits_set_up(path):
    config, own = load_config(path), ("model", "name", "steps", "backbone")
    setup = replace(SIT_SETUP, **{key: getattr(config, key) for key in own})
    expected = ["interpolant: linear -> vp", "prediction: velocity -> noise"]
    dit = [f"objective.{change}" for change in expected] if parts(path)[0] == "dit" else []
    assert differences(setup, config) == dit


@pytest.mark.parametrize("path", IMAGENET, ids=stem)
def test_a_header_names_its_own_file_run_and_steps(path):
    text, config = header(path), load_config(path)
    assert set(re.findall(r"configs/imagenet256\w+\.yaml", text)) == {f"configs/{path.name}"}
    assert set(re.findall(r"runs/([\w-]+)", text)) == {config.name}
    kinds = {script for script, _ in header_commands(path)}
    assert kinds >= {
        "encode", "train_sit.py", "sample/generate.py", "evaluate/metrics.py",
        "plan",
    }  # fmt: skip
    assert "Not reproduced here" in text and "not run" in text
    millions = config.steps == 7_000_000
    assert ("Published at 7M steps, guidance 1.5" in text) == millions
    point = f"--checkpoint runs/{config.name}/checkpoints/step_0400000"
    assert (point in text) == millions
    assert ("Published at 400k steps, no guidance" in text) == (parts(path)[0] != "dit")


UNPUBLISHED = (
    "layer_scale product", "positions learned", "no class token", "norms without weight",
    "SiT's initialisation", "registers modulated", "N(0, 0.02)", "guidance channels", "SDE",
)  # fmt: skip


@pytest.mark.parametrize("path", [p for p in IMAGENET if parts(p)[0] == "vit5"], ids=stem)
def test_a_vit5_header_lists_what_is_published_nowhere(path):
    listed = " ".join(header(path).replace("#", " ").split("Not published for ViT-5")[1].split())
    assert [choice for choice in UNPUBLISHED if choice not in listed] == []
    recipe = load_config(path).backbone.recipe
    assert (recipe.layer_scale, recipe.layer_scale_init, recipe.registers) == ("product", 1e-4, 4)


@pytest.mark.parametrize("path", [*CONFIGS, *LAUNCHERS, SBATCH], ids=stem)
def test_every_command_of_a_header_parses_and_its_files_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = header_commands(path)
    assert found or path == SBATCH
    for script, argv in found:
        if "--resume" not in argv:  # needs a run
            assert PARSERS[script](argv)
    for file in re.findall(r"(?:configs|tests)/[\w/]+\.\w+", header(path)):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("path", IMAGENET, ids=stem)
def test_the_planned_time_of_a_header_is_what_the_plan_would_print(path):
    config, device = load_config(path), DEVICES["h200"]
    cost = denoiser_cost(config.backbone, in_channels=4, input_size=(32, 32), num_classes=1000)
    seconds = 3 * cost.flops * config.batch_size / (8 * 0.4 * 1e12 * device.bf16)
    assert f"FLOPs: {duration(config.steps * seconds)} (8 H200" in header(path)


@pytest.mark.parametrize("path", LAUNCHERS, ids=stem)
def test_a_launcher_file_leaves_precision_and_compiling_to_the_configuration(path):
    settings = yaml.safe_load(path.read_text())
    assert settings["mixed_precision"] == "no"
    kind = {"gpu8_fsdp2": ["FSDP"]}.get(path.stem, ["NO", "MULTI_GPU"])
    assert settings["distributed_type"] in kind
    assert not any(word in key for key in settings for word in ("dynamo", "deepspeed"))
    assert load_config(ROOT / "configs/imagenet256_vit5_xl.yaml").batch_size % settings[
        "num_processes"
    ] == 0  # fmt: skip


@pytest.mark.parametrize("path", LAUNCHERS, ids=stem)
def test_accelerate_knows_every_key_of_a_launcher_file(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 1


def test_what_accelerate_says_of_the_fsdp2_file_is_what_the_trainer_reads(monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = ROOT / "configs/accelerate/gpu8_fsdp2.yaml"
    options = launch_command_parser().parse_args(["--config_file", str(path), "train_sit.py"])
    for name, value in prepare_multi_gpu_env(_validate_launch_command(options)[0]).items():
        monkeypatch.setenv(name, value)
    check_plain_launcher()
    assert parallel(TrainConfig()) == "fsdp2"


def test_accelerate_launches_a_run_with_the_cpu_file(tmp_path):
    command = [
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
        "--config_file", "configs/accelerate/cpu.yaml", "train_sit.py",
        "--config", "tests/tiny.yaml", "--steps", "1", "--output-dir", str(tmp_path),
    ]  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "tiny/latest").is_file()


def stand_in(folder, name: str, text: str) -> None:
    """An executable that takes the place of one of Slurm's."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def submit(folder, status: int) -> tuple[int, str]:
    """Runs the batch script where srun's task ends with `status`; its exit status and the calls."""
    stand_in(folder, "python", f'echo "rank $RANK of $WORLD_SIZE: $*" >> {folder}/calls')
    stand_in(folder, "srun", f'SLURM_PROCID=3 SLURM_LOCALID=3 "$@"; exit {status}')
    stand_in(folder, "scontrol", f'echo "scontrol $*" >> {folder}/calls; echo node1')
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "16",
        "SLURM_JOB_NODELIST": "node[1-2]", "LATENTS": "/data/latents",
    }  # fmt: skip
    ended = subprocess.run(["bash", str(SBATCH)], cwd=folder, env=environment, timeout=60)
    return ended.returncode, (folder / "calls").read_text()


def test_the_batch_script_is_bash_and_asks_for_the_signal_it_requeues_on():
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    text = SBATCH.read_text()
    assert "--signal=USR1@" in text and "-eq 138" in text
    config = load_config(ROOT / re.search(r"^config=(\S+)", text, re.MULTILINE)[1])
    assert f"run=runs/{config.name} " in text


def test_the_batch_script_starts_ranks_and_does_not_requeue_a_finished_run(tmp_path):
    code, calls = submit(tmp_path, 0)
    assert code == 0 and "requeue" not in calls
    assert "rank 3 of 16: train_sit.py --config configs/imagenet256_vit5_xl.yaml" in calls


def test_the_batch_script_requeues_on_the_signal_alone_and_resumes(tmp_path):
    assert "requeue" not in submit(tmp_path, 2)[1]
    (tmp_path / "runs/imagenet256-vit5-xl").mkdir(parents=True)
    (tmp_path / "runs/imagenet256-vit5-xl/latest").touch()
    code, calls = submit(tmp_path, 138)
    assert code == 138 and calls.splitlines()[-1] == "scontrol requeue 7"
    assert shlex.split(calls.splitlines()[-2])[-2:] == ["--resume", "runs/imagenet256-vit5-xl"]


def test_every_message_of_the_troubleshooting_page_is_one_of_ours():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    source = "".join(path.read_text() for path in sorted((ROOT / "sit_vit5").rglob("*.py")))
    source = re.sub(r'"\s*f?"', "", source)  # strings over several lines as one
    quoted = re.findall(r"You see: `([^`]+)`", text)
    assert len(quoted) > 15
    for message in quoted:
        for piece in filter(None, (part.strip(" ") for part in message.split("..."))):
            assert piece in source, message


def test_headers_state_the_published_values():
    curves, values = published().curves, published().values
    for path in IMAGENET:
        model = load_config(path).model
        if parts(path)[0] != "dit":
            stated = re.search(r"no guidance: FID ([\d.]+), read", header(path))[1]
            assert float(stated) == curves[model][400_000], path
        if parts(path)[0] == "vit5":
            plain = re.search(rf"plain {rival(model)} there: ([\d.]+)\.\n", header(path))[1]
            assert float(plain) == curves[rival(model)][400_000], path
        if found := re.search(
            r"guidance 1.5: FID ([\d.]+), Inception Score ([\d.]+)", header(path)
        ):
            (entry,) = (
                entry for entry in values
                if (entry.model, entry.training) == (paper_name(model), "7M steps")
            )  # fmt: skip
            assert (entry.fid, entry.score) == tuple(map(float, found.groups())), path
