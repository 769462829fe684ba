"""Every command as a user runs it: its own process, its exit status, its last line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    assert_equal,
    command_environment,
    command_line,
    final_tensors,
    run_here,
)
from PIL import Image

from sit_vit5.commands import COMMANDS
from sit_vit5.commands import main as commands_main
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.utils.errors import UserError

SCRIPTS = (
    "train_sit.py",
    "sample/grid.py",
    "sample/generate.py",
    "sample/trajectory.py",
    "sample/interpolate.py",
    "evaluate/metrics.py",
    "evaluate/attention.py",
    "evaluate/sweep.py",
    "evaluate/likelihood.py",
    "evaluate/reconstruction.py",
    "posthoc-ema",
    "encode",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of the tiny configuration, trained once."""
    folder = tmp_path_factory.mktemp("runs")
    finished = subprocess.run(
        command_line("train_sit.py", *TINY, "--output-dir", folder, "--preview.every", 6),
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return folder / "tiny"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_option_and_imports_no_torch(script):
    argv, start = [script, "--help"], f"runpy.run_path({script!r}"
    if not script.endswith(".py"):
        argv, start = ["sit_vit5", *argv], "runpy.run_module('sit_vit5'"
    code = (
        "import runpy, sys\n"
        f"sys.argv = {argv!r}\n"
        "try:\n"
        f"    {start}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "(default: " in shown.stdout
    assert len(shown.stdout.split("--")) > 8
    expected = {
        "train_sit.py": ["--resume", "--backbone.recipe.layer-scale", "--optimizer.lr FLOAT"],
        "sample/grid.py": ["--checkpoint", "--columns"],
        "sample/generate.py": ["--num-samples", "--labels {random,balanced}"],
        "sample/trajectory.py": ["--checkpoint", "--frames {None}|INT", "--sde.last-step"],
        "sample/interpolate.py": ["--seeds", "--to-class"],
        "evaluate/metrics.py": ["--reference", "--inception-weights"],
        "evaluate/attention.py": ["--checkpoint", "--interpolation {nearest,bilinear}"],
        "evaluate/sweep.py": ["--scales", "--intervals", "--agreement"],
        "evaluate/likelihood.py": ["--data", "--probes", "--dequantize"],
        "evaluate/reconstruction.py": ["--data", "--posterior {mode,sample}", "--codec.name"],
        "posthoc-ema": ["--run", "--width FLOAT", "--step {None}|INT"],
        "encode": ["--out", "--dtype {float32,float16}", "--codec.path"],
    }[script]
    assert all(option in shown.stdout for option in expected)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_has_a_main(name, capsys):
    with pytest.raises(SystemExit) as stop:
        commands_main([name, *(["make"] if name == "reference" else []), "--help"])
    assert not stop.value.code and "--" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(UserError, match="unknown command 'gird'; nearest: grid"):
        commands_main(["gird"])
    assert commands_main([]) == 0
    assert all(f"  {name} " in capsys.readouterr().out for name in ("train",))


def test_a_trained_run_holds_a_preview_and_its_log(trained):
    assert Image.open(trained / "samples" / "step_0000006.png").size[0] > 100
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_grid_writes_a_labelled_picture_and_prints_its_path(command, trained, tmp_path):
    out = tmp_path / "deep" / "grid.png"
    shown = command(
        "sample/grid.py", "--checkpoint", trained / "latest", "--steps", 2, "--columns", 3,
        "--classes", "7", "3", "--out", out,
    )  # fmt: skip
    assert shown.stdout.splitlines()[-1] == str(out)
    width, height = Image.open(out).size
    assert 3 * 64 < width < 3 * 64 + 120 and 2 * 64 < height < 2 * 64 + 60


def test_generate_makes_the_same_set_on_one_and_two_processes(command, trained, tmp_path):
    options = ("--checkpoint", trained, "--num-samples", 17, "--batch-size", 4, "--steps", 2)
    outs = [tmp_path / "one", tmp_path / "two"]
    for processes, out in enumerate(outs, start=1):
        shown = command("sample/generate.py", *options, "--out", out, processes=processes)
        assert shown.stdout.splitlines()[-1] == str(out / "samples.npz")
    one, two = (np.load(out / "samples.npz")["arr_0"] for out in outs)
    assert one.shape == (17, 8, 8, 1) and one.dtype == np.uint8
    assert (one == two).all()
    assert len(np.unique(one.reshape(17, -1), axis=0)) == 17
    facts = [json.loads((out / "samples.json").read_text()) for out in outs]
    assert facts[0]["settings"] == facts[1]["settings"]
    assert [fact["processes"] for fact in facts] == [1, 2]
    assert facts[0]["evaluations_per_image"] == 4 and len(facts[0]["labels"]) == 17


def test_generate_writes_pngs_of_what_is_in_the_archive(trained, tmp_path):
    options = ("--checkpoint", trained, "--num-samples", 3, "--steps", 1, "--out", tmp_path / "s")
    run_here("sample/generate.py", *options)
    run_here("sample/generate.py", *options, "--png", True)  # later, too
    pixels = np.load(tmp_path / "s" / "samples.npz")["arr_0"]
    files = sorted((tmp_path / "s" / "images").iterdir())
    assert [file.name for file in files] == ["000000.png", "000001.png", "000002.png"]
    for file, image in zip(files, pixels, strict=True):
        assert (np.asarray(Image.open(file)) == image.squeeze(-1)).all()


def test_generate_takes_given_labels_from_a_file(trained, tmp_path):
    options = ["--checkpoint", trained, "--num-samples", 5, "--steps", 1, "--batch-size", 2]
    (tmp_path / "labels.txt").write_text("3\n1\n4\n1\n5\n")
    given = ("--labels-file", tmp_path / "labels.txt")
    run_here("sample/generate.py", *options, *given, "--out", tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "samples.json").read_text())
    assert manifest["labels"] == [3, 1, 4, 1, 5] and manifest["settings"]["labels"] == "given"
    base = ["--checkpoint", trained, "--out", tmp_path / "x", "--labels-file"]
    for argv, message in (
        ([tmp_path / "labels.txt", "--num-samples", 6], "holds 5 labels for num_samples 6"),
        ([tmp_path / "labels.txt", "--labels", "balanced"], "stands for labels and classes"),
        ([tmp_path / "absent"], "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            run_here("sample/generate.py", *base, *argv)


def test_guidance_options_without_a_scale_are_refused(trained, tmp_path):
    for argv in (["--guidance.interval", 0.3, 1], ["--guidance.schedule", "linear"]):
        with pytest.raises(UserError, match="has no effect: give guidance.scale, such as 2"):
            run_here("sample/generate.py", "--checkpoint", trained, "--out", tmp_path / "s", *argv)


def test_generate_killed_and_run_again_makes_what_is_missing(trained, tmp_path, capsys):
    def options(out: Path) -> list[object]:
        return [
            "--checkpoint", trained, "--num-samples", 600, "--batch-size", 4, "--steps", 20,
            "--guidance.scale", 1.5, "--out", out,
        ]  # fmt: skip

    run_here("sample/generate.py", *options(tmp_path / "whole"))
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        command_line("sample/generate.py", *options(cut)),
        cwd=ROOT, env=command_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    cost = cut / "samples.partial" / "cost.npy"
    wait_for(lambda: cost.exists() and (np.load(cost)[:, 0] > 0).sum() >= 40)
    with pytest.raises(UserError, match="in use by another sampling run"):
        run_here("sample/generate.py", *options(cut))
    process.kill()
    process.wait()
    done = int((np.load(cost)[:, 0] > 0).sum())
    assert 40 <= done < 600
    with pytest.raises(UserError, match=r"other settings \(sampler"):
        run_here("sample/generate.py", *options(cut), "--seed", 1)
    run_here("sample/generate.py", *options(cut))
    made = json.loads((cut / "samples.json").read_text())
    assert made["images_made_by_main_process_in_last_session"] == 600 - done
    assert (cut / "samples.npz").read_bytes() == (tmp_path / "whole" / "samples.npz").read_bytes()
    run_here("sample/generate.py", *options(cut))
    assert "complete already" in capsys.readouterr().out


def wait_for(condition, seconds: float = 120) -> None:
    """Polls until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_training_killed_at_several_moments_ends_bit_identical(tmp_path):
    options = [*TINY, "--steps", 300, "--checkpoint.every", 10, "--log-every", 10]
    options += ["--checkpoint.keep", 2, "--checkpoint.milestone-every", 50]
    options += ["--output-dir", tmp_path]
    run_here("train_sit.py", *options, "--name", "whole")
    run = tmp_path / "cut"
    for stop_at in (30, 120, 210):
        arguments = ["--resume", run] if run.exists() else [*options, "--name", "cut"]
        process = subprocess.Popen(
            command_line("train_sit.py", *arguments),
            cwd=ROOT, env=command_environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda at=stop_at: reached(run) >= at)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert stop_at <= reached(run) < 300
    run_here("train_sit.py", "--resume", run)
    assert_equal(final_tensors(tmp_path / "whole"), final_tensors(run))
    left = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
            for name in ("whole", "cut")]  # fmt: skip
    assert left[0] == left[1]


def reached(run: Path) -> int:
    """Step that `latest` names; -1 before the first checkpoint."""
    pointer = run / "latest"
    return int(pointer.read_text().strip()[-7:]) if pointer.is_file() else -1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_and_says_how_to_go_on(tmp_path, number, code):
    process = subprocess.Popen(
        command_line("train_sit.py", *TINY, "--steps", 100_000, "--output-dir", tmp_path,
                     "--checkpoint.every", 0),
        cwd=ROOT, env=command_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = tmp_path / "tiny" / "metrics.jsonl"
    wait_for(lambda: log.is_file() and len(log.read_text().splitlines()) > 3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code
    last = output.splitlines()[-1]
    assert f"continue with: python train_sit.py --resume {tmp_path / 'tiny'}" in last
    assert reached(tmp_path / "tiny") == int(last.split("at step ")[1].split(";")[0]) > 0
    assert "Traceback" not in errors


def test_two_processes_stop_together_with_one_line_where_one_meets_a_bad_image(
    command, image_folder, tmp_path
):
    (image_folder / "dog" / "05.png").write_bytes(b"broken")
    failed = command(
        "train_sit.py", *TINY, "--output-dir", tmp_path, "--data.source", "folder",
        "--data.path", image_folder, "--batch-size", 4, "--checkpoint.every", 0,
        processes=2, check=False,
    )  # fmt: skip
    ours = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and "05.png: cannot be decoded" in ours[0]
    assert "gloo" not in failed.stderr
    assert reached(tmp_path / "tiny") >= 0


def test_an_unconditional_run_trains_samples_and_is_evaluated(tmp_path):
    run_here(
        "train_sit.py", *TINY, "--output-dir", tmp_path, "--data.unconditional", True,
        "--steps", 2, "--preview.every", 1,
    )  # fmt: skip
    run = tmp_path / "tiny"
    assert (run / "samples" / "step_0000002.png").is_file()
    run_here("sample/grid.py", "--checkpoint", run, "--steps", 1)
    samples = ("--num-samples", 3, "--out", tmp_path / "s")
    run_here("sample/generate.py", "--checkpoint", run, *samples)
    run_here("evaluate/metrics.py", tmp_path / "s" / "samples.npz", "--reference", "digits",
            "--features", "pixels")  # fmt: skip
    assert json.loads((tmp_path / "s" / "samples.json").read_text())["labels"] == [0, 0, 0]
    run_here("sample/trajectory.py", "--checkpoint", run, "--steps", 2, "--frames", 3)
    run_here("sample/interpolate.py", "--checkpoint", run, "--steps", 1)
    assert (run / "samples" / "interpolation_step_0000002.png").is_file()
    with pytest.raises(UserError, match="unconditional"):
        run_here("sample/interpolate.py", "--checkpoint", run, "--to-class", 1)
    with pytest.raises(UserError, match="unconditional"):
        run_here("sample/grid.py", "--checkpoint", run, "--classes", 1)


def test_two_processes_save_when_one_signal_arrives(tmp_path):
    process = subprocess.Popen(
        command_line("train_sit.py", *TINY, "--steps", 100_000, "--output-dir", tmp_path,
                     "--checkpoint.every", 0, processes=2),
        cwd=ROOT, env=command_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = tmp_path / "tiny" / "metrics.jsonl"
    wait_for(lambda: log.is_file() and len(log.read_text().splitlines()) > 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "interrupted at step" in output
    assert reached(tmp_path / "tiny") > 0


BAD_COMMANDS = {
    "no data": (["train_sit.py"], "no data given.*configs/digits.yaml"),
    "unknown model": (["train_sit.py", "--model", "ViT5-XXL"], "nearest: ViT5-XL"),
    "absent folder": (["train_sit.py", "--data.path", "absent"], "absent does not exist"),
    "batch": (["train_sit.py", *TINY, "--batch-size", "15", "--accumulation", "2"], "14 or 16"),
    "absent run": (["train_sit.py", "--resume", "runs/absent"], "does not exist"),
    "absent checkpoint": (["sample/grid.py", "--checkpoint", "absent"], "does not exist"),
    "config not a file": (["train_sit.py", "--config", "configs/digits.yaml/x"], "does not exist"),
    "output is a file": (["train_sit.py", *TINY, "--output-dir", "README.md"], "README.md"),
    "picture kind": (["sample/grid.py", "--checkpoint", "x", "--out", "x.foo"], "end in .png"),
    "kind of path": (["sample/trajectory.py", "--checkpoint", "x", "--out", "x.mp4"],
                     "out x.mp4 must end in .png, .gif or .webp"),
    "one frame": (["sample/trajectory.py", "--checkpoint", "x", "--frames", "1"],
                  "frames 1 must be at least 2"),
    "one seed": (["sample/interpolate.py", "--checkpoint", "x", "--seeds", "3"],
                 "seeds 3 must be two or more, such as 0 1"),
    "absent samples": (["evaluate/metrics.py", "absent", "--reference", "digits",
                        "--features", "pixels"], "absent' does not exist"),
    "upside-down interval": (["evaluate/sweep.py", "--checkpoint", "x", "--reference", "digits",
                              "--intervals", "1,0"], "intervals 1 0 is upside down"),
    "no data of a likelihood": (["evaluate/likelihood.py", "--checkpoint", "x"],
                                "data must be given"),
    "absent classifier": (["evaluate/attention.py", "--classifier", "absent.pth", "--image",
                           "digits:0"], "absent.pth is no weights file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_a_wrong_command_gets_one_line_and_status_two(command, name):
    (script, *arguments), message = BAD_COMMANDS[name]
    failed = command(script, *arguments, check=False)
    assert failed.returncode == 2
    (line,) = failed.stderr.strip().splitlines()
    assert line.startswith("error: ")
    import re

    assert re.search(message, line)


def test_a_class_outside_the_range_is_named(command, trained):
    failed = command("sample/grid.py", "--checkpoint", trained, "--classes", 10, check=False)
    assert (
        failed.returncode == 2 and "class '10' is no class name; classes: 0, 1, 2" in failed.stderr
    )


def test_path_draws_a_strip_and_an_animation(command, trained, tmp_path, capsys):
    shown = command(
        "sample/trajectory.py", "--checkpoint", trained, "--steps", 9, "--classes", 3, 7
    )
    strip = Path(shown.stdout.splitlines()[-1])
    assert strip == trained / "samples" / "path_step_0000006.png"
    width, height = Image.open(strip).size
    assert 10 * 64 < width < 10 * 64 + 300 and 4 * 64 < height < 4 * 64 + 120
    out = tmp_path / "deep" / "path.gif"
    run_here(
        "sample/trajectory.py", "--checkpoint", trained, "--method", "stochastic_heun",
        "--steps", 7, "--images", 3, "--frames", 8, "--out", out,
    )  # fmt: skip
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    with Image.open(out) as animation:
        assert animation.n_frames == 8
        assert animation.size[0] > 6 * 64 and animation.size[1] > 4 * 64  # four classes


def test_interpolate_starts_and_ends_at_the_grids_images(trained, tmp_path):
    """Index 0 of either seed, pixel by pixel; 1 for the rounding of another batch shape."""
    options = ("--checkpoint", trained, "--steps", 2, "--classes", 3)

    def picture(script: str, *argv: object) -> np.ndarray:
        run_here(f"sample/{script}", *options, *argv, "--out", tmp_path / "x.png")
        return np.asarray(Image.open(tmp_path / "x.png")).astype(int)

    strip = picture("interpolate.py", "--seeds", 4, 9, "--frames", 5)
    left = strip.shape[1] - 5 * 68 - 12  # five tiles with their gaps, and the block's margin
    for seed, column in ((4, 0), (9, 4)):
        own = picture("grid.py", "--columns", 1, "--seed", seed)[-68:-4, left : left + 64]
        tile = strip[-68:-4, left + column * 68 : left + column * 68 + 64]
        assert np.abs(tile - own).max() <= 1 and tile.std() > 20


def test_interpolate_writes_an_animation_and_refuses_what_has_no_effect(trained, tmp_path):
    out = tmp_path / "x.webp"
    run_here(
        "sample/interpolate.py", "--checkpoint", trained, "--steps", 1, "--seeds", 0, 1, 0,
        "--frames", 4, "--to-class", 7, "--out", out,
    )  # fmt: skip
    assert Image.open(out).n_frames == 7
    for argv, message in (
        (["--seed", 1], "seed 1 has no effect; use seeds"),
        (["--to-class", "x"], "class 'x' is no class name"),
        (["--classes", 11], "class '11' is no class name"),
        (["--seeds", -1, 2], "seeds -1 must be at least 0"),
    ):
        with pytest.raises(UserError) as error:
            run_here("sample/interpolate.py", "--checkpoint", trained, *argv)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_path_refuses_more_than_the_sampler_or_a_batch_can_show(trained):
    for argv, message in (
        (["--steps", 3, "--frames", 10], "frames 10 must be at most 4"),
        (["--images", 17], "68 images must be at most batch_size 64"),
        (["--classes", "x"], "class 'x' is no class name"),
    ):
        with pytest.raises(UserError) as error:
            run_here("sample/trajectory.py", "--checkpoint", trained, *argv)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_metrics_prints_a_table_and_the_path_of_its_json(command, trained, tmp_path):
    command(
        "sample/generate.py", "--checkpoint", trained, "--num-samples", 20, "--steps", 1,
        "--labels", "balanced", "--out", tmp_path / "s",
    )  # fmt: skip
    shown = command(
        "evaluate/metrics.py", tmp_path / "s" / "samples.npz", "--reference", "digits:held-out",
        "--features", "pixels", "--floor", "digits:train", "--agreement", "digits",
    )  # fmt: skip
    path = Path(shown.stdout.splitlines()[-1])
    result = json.loads(path.read_text())
    assert path == tmp_path / "s" / "metrics.json"
    assert result["frechet_distance"] > 10 * result["floor"]["frechet_distance"]
    assert result["manifest"]["settings"]["sampler"]["steps"] == 1
    assert "floor (digits:train): Frechet distance of pixels-1437" in shown.stdout


def test_attention_draws_a_denoisers_maps_and_gates(command, trained, tmp_path):
    shown = command("evaluate/attention.py", "--checkpoint", trained, "--out", tmp_path / "a")
    maps, gates = map(Path, shown.stdout.splitlines()[-2:])
    assert (maps, gates) == (tmp_path / "a" / "attention.png", tmp_path / "a" / "gates.png")
    width, height = Image.open(maps).size
    assert width > 3 * height / 2  # one block: the image, x_t and four registers in a row
    assert Image.open(gates).size == (770, 440)
    assert shown.stdout.splitlines()[1].split()[:2] == ["block", "attention"]
    assert "Warning" not in shown.stderr


def test_attention_options_change_the_maps(trained, tmp_path, capsys):
    pictures = {}
    for options in (
        (), ("--t", 0.1), ("--label", 3), ("--image", "digits:train:3"), ("--head", 1),
        ("--seed", 1), ("--interpolation", "bilinear"), ("--weights", "raw"),
    ):  # fmt: skip
        run_here("evaluate/attention.py", "--checkpoint", trained, "--out", tmp_path, *options)
        pictures[options] = (tmp_path / "attention.png").read_bytes()
    assert len(set(pictures.values())) == len(pictures)
    before = capsys.readouterr().out.splitlines()[-3]
    run_here(
        "evaluate/attention.py", "--checkpoint", trained, "--out", tmp_path, "--suppressed", 0.99
    )
    after = capsys.readouterr().out.splitlines()[-3]
    assert float(after.split()[1].strip("%")) > 30 > float(before.split()[1].strip("%"))


WRONG_ATTENTION = [
    (["--t", "1.5"], "t 1.5 must be at most 1"),
    (["--t", "-0.1"], "t -0.1 must be at least 0"),
    (["--label", "10"], "class '10' is no class name; classes: 0, 1"),
    (["--blocks", "0", "1"], "block 1 is not in 0..0"),
    (["--head", "2"], "head 2 is not in 0..1"),
    (["--image", "absent.png"], "image absent.png does not exist"),
    (["--image", "README.md"], "README.md: cannot be decoded"),
    (["--image", "digits:360"], "digits has no image '360'; use 0 to 359"),
    (["--suppressed", "0"], "suppressed 0.0 must be above 0"),
    (["--heads", "3"], "heads has no use for a denoiser"),
    (["--weights", "ema_0.5"], "weights 'ema_0.5' are not in"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_ATTENTION, ids=lambda part: str(part)[:24])
def test_attention_refuses_wrong_options_in_one_line(trained, argv, message, tmp_path):
    with pytest.raises(UserError) as error:
        run_here("evaluate/attention.py", "--checkpoint", trained, "--out", tmp_path, *argv)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_attention_draws_an_unconditional_plain_model_and_an_unlabelled_file(command, tmp_path):
    command(
        "train_sit.py", *TINY, "--output-dir", tmp_path, "--data.unconditional", True, "--steps", 1,
        "--backbone.recipe.registers", 0, "--backbone.recipe.register-theta", "None",
    )  # fmt: skip
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(tmp_path / "image.png")
    run_here(
        "evaluate/attention.py",
        "--checkpoint",
        tmp_path / "tiny",
        "--image",
        tmp_path / "image.png",
    )
    folder = tmp_path / "tiny" / "samples" / "attention_step_0000001"
    width, height = Image.open(folder / "attention.png").size
    assert width > height and (folder / "gates.png").is_file()
    with pytest.raises(UserError, match="unconditional"):
        run_here("evaluate/attention.py", "--checkpoint", tmp_path / "tiny", "--label", 1)


def test_a_full_disk_during_training_leaves_the_last_checkpoint(tmp_path):
    # A file size limit stands in for the disk: the first checkpoint fits, a larger one does not.
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "sys.argv[0] = 'train_sit.py'\n"
        "import runpy; runpy.run_path('train_sit.py', run_name='__main__')\n"
    )
    failed = subprocess.run(
        [sys.executable, "-c", code, *TINY, "--output-dir", str(tmp_path)],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert failed.returncode == 2
    assert "cannot save the checkpoint of step 2" in failed.stderr
    assert "last good checkpoint" in failed.stderr and "step_0000000" in failed.stderr
    assert open_checkpoint(tmp_path / "tiny").state.step == 0
    assert not list(tmp_path.rglob("*.partial"))


def test_compiled_recomputed_blocks_on_two_processes_train_as_eager_ones(tmp_path):
    """Row M6; two blocks of one shape must compile once, and steps must not compile anew."""
    options = (*TINY, "--output-dir", tmp_path, "--backbone.depth", 2, "--steps", 4)
    faster = ("--compile", True, "--activation-checkpointing", True, "--name", "compiled")
    for arguments, processes in (((*options, "--name", "eager"), 1), ((*options, *faster), 2)):
        finished = subprocess.run(
            command_line("train_sit.py", *arguments, processes=processes),
            cwd=ROOT,
            env=command_environment() | {"TORCH_LOGS": "recompiles"},
            capture_output=True,
            text=True,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "Recompiling" not in finished.stderr
    eager, compiled = final_tensors(tmp_path / "eager"), final_tensors(tmp_path / "compiled")
    assert eager.keys() == compiled.keys()
    for name in eager:
        torch.testing.assert_close(eager[name], compiled[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_errors_read_the_same_on_an_ascii_terminal(encoding):
    shown = subprocess.run(
        command_line("train_sit.py", "--steps", 0),
        cwd=ROOT,
        env=command_environment() | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
    )
    assert shown.stderr == "error: steps 0 must be at least 1\n"
