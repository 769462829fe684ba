"""Step 0 of a reproduction with stand-ins: tiny SiT weights, references of 16 pixels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import golden_weights, run_here

from sit_vit5.config import CalibrateConfig, CodecConfig
from sit_vit5.evaluation.calibration import SAMPLERS, Values, calibrate, judge
from sit_vit5.report.published import published
from sit_vit5.sampling.generator import Generator
from sit_vit5.utils.distributed import alone
from sit_vit5.utils.errors import UserError


def official_sit(path: Path) -> Path:
    """A SiT of the golden one's width and the depth of ours at that width, as its trainer saves."""
    weights = golden_weights("sit_model_nosigma")
    last = {key: tensor for key, tensor in weights.items() if key.startswith("blocks.2.")}
    weights |= {
        key.replace("blocks.2.", "blocks.3."): tensor.clone() for key, tensor in last.items()
    }
    torch.save({"ema": weights}, path)
    return path


def images(path: Path, count: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    np.savez(path, arr_0=rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_vae) -> CalibrateConfig:
    """Every input as a stand-in."""
    folder = tmp_path_factory.mktemp("inputs")
    return CalibrateConfig(
        reference=str(images(folder / "reference.npz", 12, 0)),
        adm_samples=str(images(folder / "adm.npz", 9, 1)),
        weights=str(official_sit(folder / "weights.pt")),
        features="pixels",
        num_samples=3,
        batch_size=2,
        codec=CodecConfig(path=str(tiny_vae)),
    )


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The folder of a calibration that ran through."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    calibrate(replace(inputs, out=str(folder)), alone())
    return folder


def values(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "calibration.json").read_text())["values"]


def archives(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name / "samples.npz").read_bytes() for name in SAMPLERS}


def test_every_sampler_and_adms_samples_are_measured(whole):
    found = values(whole)
    assert list(found) == ["adm", *SAMPLERS]
    assert found["adm"]["count"] == 9
    distances = {entry["frechet_distance"] for entry in found.values()}
    assert len(distances) == 4 and min(distances) > 0
    assert len(set(archives(whole).values())) == 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_those_of_the_flags_that_are_advised(whole, inputs, name, tmp_path):
    run_here(
        "sample/generate.py", "--checkpoint", whole / "sit-xl", "--out", tmp_path,
        "--num-samples", 3, "--batch-size", 2, *SAMPLERS[name].flags.split(),
        "--sde.diffusion" if "sde" in name else "--eps",
        "sigma" if "sde" in name else 0.001,
        "--guidance.scale", 1.5, "--guidance.channels", 3,
    )  # fmt: skip
    assert (tmp_path / "samples.npz").read_bytes() == archives(whole)[name]
    settings = json.loads((tmp_path / "samples.json").read_text())["settings"]
    assert settings["sampler"]["steps"] == SAMPLERS[name].steps


def test_a_finished_calibration_only_reads(whole, inputs, monkeypatch, capsys):
    def called(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("sit_vit5.evaluation.calibration.evaluate", called)
    monkeypatch.setattr(Generator, "__call__", called)
    calibrate(replace(inputs, out=str(whole)), alone())
    shown = capsys.readouterr().out
    for entry in values(whole).values():
        assert f"{entry['frechet_distance']:.4f}" in shown
    assert "missing" not in shown
    assert "3.9426  6.1404  215.84     0.8265  0.5309" in shown


def test_an_interrupted_calibration_continues(whole, inputs, tmp_path, monkeypatch):
    calls, real = [], Generator.__call__

    def call(generator, indices, labels):
        calls.append(len(indices))
        if len(calls) == 4:  # in the second of three samplers, which take two each
            raise KeyboardInterrupt
        return real(generator, indices, labels)

    monkeypatch.setattr(Generator, "__call__", call)
    options = replace(inputs, out=str(tmp_path / "cut"))
    with pytest.raises(KeyboardInterrupt, match="2 of 3 images are made"):
        calibrate(options, alone())
    calibrate(options, alone())
    assert len(calls) == 6 + 1
    assert archives(tmp_path / "cut") == archives(whole)


def test_other_images_are_measured_again(whole, inputs, tmp_path):
    options = replace(inputs, out=str(whole), weights="absent", adm_samples=str(tmp_path / "a.npz"))
    before = json.loads((whole / "adm.metrics.json").read_text())["frechet_distance"]
    images(tmp_path / "a.npz", 9, seed=2)
    calibrate(options, alone())
    assert json.loads((whole / "adm.metrics.json").read_text())["frechet_distance"] != before
    # Samples that are made already need no weights.
    assert list(values(whole)) == ["adm", *SAMPLERS]


@pytest.mark.parametrize(
    ("absent", "made", "words"),
    [
        ("adm_samples", SAMPLERS, "folder evaluations of github.com/openai/guided-diffusion"),
        ("weights", ("adm",), "README of github.com/willisma/SiT; --weights FILE"),
        ("reference", (), "--reference FILE"),
    ],
)
def test_a_missing_input_is_named_and_the_other_parts_run(
    inputs, tmp_path, capsys, absent, made, words
):
    options = replace(inputs, out=str(tmp_path / "out"), num_samples=2, **{absent: "no.npz"})
    calibrate(options, alone())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "missing: " in line]
    assert "no.npz" in line and words in line
    assert list(values(tmp_path / "out")) == list(made)
    assert (tmp_path / "out/ode_heun/samples.npz").exists() == (absent != "weights")


def test_without_any_input_all_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="nothing can be calibrated: the inputs"):
        calibrate(CalibrateConfig(), alone())
    shown = capsys.readouterr().out
    for name in (
        "VIRTUAL_imagenet256_labeled.npz", "admnet_guided_upsampled_imagenet256.npz",
        "SiT-XL-2-256.pt", "hf download stabilityai/sd-vae-ft-ema", "--feature-weights FILE",
    ):  # fmt: skip
        assert name in shown
    assert shown.count("missing: ") == 5 and not list(tmp_path.iterdir())


def test_a_checkpoint_of_other_weights_is_refused(whole, inputs, tmp_path):
    other = official_sit(tmp_path / "other.pt")
    other.write_bytes(other.read_bytes() + b"\0")
    with pytest.raises(UserError, match="is made of other weights than .*other.pt"):
        calibrate(replace(inputs, out=str(whole), weights=str(other)), alone())


def test_two_processes_make_the_same_samples(whole, inputs, tmp_path, command):
    options = [
        "--reference", inputs.reference, "--adm-samples", inputs.adm_samples, "--weights",
        inputs.weights, "--features", "pixels", "--num-samples", 3, "--batch-size", 2,
        "--codec.path", inputs.codec.path, "--out", tmp_path / "two",
    ]  # fmt: skip
    shown = command("evaluate/calibrate.py", *options, processes=2)
    assert shown.stdout.count("not judged: published values are not of the features pixels") == 1
    assert archives(tmp_path / "two") == archives(whole)
    one, two = values(whole), values(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in SAMPLERS:
        assert two[name]["frechet_distance"] == pytest.approx(one[name]["frechet_distance"])


def measured(fid: float, count: int = 50_000, **changes: float | None) -> Values:
    """What Inception would give; changes: of ADM's values."""
    stated = {name: entry.value for name, entry in published().evaluator.items()}
    return Values(count, "s", "r", {}, **stated | {"frechet_distance": fid} | changes)


ADM = {"adm": measured(3.95)}


@pytest.mark.parametrize(
    ("results", "met", "words"),
    [
        (ADM | {"sde_norm_0.5": measured(2.1)}, True, "steps 250 --sde.norm 0.5"),
        (ADM | {"sde_norm_1": measured(2.5), "ode_heun": measured(2.08)}, True, "method heun"),
        (ADM | {"sde_norm_1": measured(1.96), "ode_heun": measured(2.08)}, True, "method heun"),
        (ADM | {"ode_heun": measured(2.17)}, False, "none gives the published 2.06 within 0.1"),
        (ADM | {"ode_heun": measured(2.06, 5000)}, False, "5,000 samples instead of 50,000"),
        (ADM, False, "sampler: not checked"),
        ({"ode_heun": measured(2.06)}, False, "evaluator: not checked"),
        ({"adm": measured(4.0), "ode_heun": measured(2.06)}, False, "off by more.*FID +0.05744"),
        ({"adm": measured(3.94, recall=None)}, False, "recall is missing"),
        ({"adm": measured(3.94, 40_000)}, False, "40,000 images instead of 50,000"),
    ],
)
def test_a_value_within_the_tolerance_decides(results, met, words):
    judged = judge(results, features="inception")
    assert judged.met is met
    (text,) = [" ".join(judged.verdict)]
    assert all(word in text for word in words.split(".*"))
    assert not judge(results, features="pixels").met
