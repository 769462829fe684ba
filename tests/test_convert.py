"""Official weights into folders, as a user does it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, golden_weights, run_here
from PIL import Image
from safetensors.torch import load_file, save_file

from sit_vit5.commands.convert import main
from sit_vit5.flow.interpolants import INTERPOLANTS
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.classifier import load_classifier
from sit_vit5.utils.errors import UserError


@pytest.fixture
def sit(tmp_path) -> Path:
    """SiT's golden weights as its trainer saves them: raw, averaged, and more."""
    weights = golden_weights("sit_model_nosigma")
    raw = {key: tensor + 1 for key, tensor in weights.items()}
    torch.save({"model": raw, "ema": weights, "opt": {}}, tmp_path / "sit.pt")
    return tmp_path / "sit.pt"


def test_an_imported_sit_samples_and_evaluates_like_ours(tmp_path, sit, tiny_vae, command, capsys):
    folder = tmp_path / "sit"
    codec = ("--codec.path", tiny_vae)
    said = command("convert", sit, "--to", folder, "--heads", 4, *codec)
    assert said.stdout.splitlines()[-1] == str(folder)
    picture = tmp_path / "grid.png"
    drawn = ("--columns", 2, "--steps", 2, "--out", picture)
    run_here("sample/grid.py", "--checkpoint", folder, *drawn)
    assert Image.open(picture).width > 32
    options = ("--num-samples", 4, "--steps", 1, "--guidance.scale", 1.5)
    run_here("sample/generate.py", "--checkpoint", folder, "--out", tmp_path / "s", *options)
    samples = np.load(tmp_path / "s" / "samples.npz")["arr_0"]
    assert samples.shape == (4, 16, 16, 3)
    arguments = ("--features", "pixels", "--reference", tmp_path / "s" / "samples.npz")
    run_here("evaluate/metrics.py", tmp_path / "s" / "samples.npz", *arguments)
    assert "frechet" in capsys.readouterr().out.lower()


def test_the_imported_network_is_the_official_one(tmp_path, sit, tiny_vae):
    main([str(sit), "--to", str(tmp_path / "a"), "--heads=4", f"--codec.path={tiny_vae}"])
    golden = load_file(ROOT / "tests" / "golden" / "sit_model_nosigma.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a")
    inputs = [golden[f"input.{name}"] for name in "xty"]
    ours = checkpoint.denoiser("ema").eval()(*inputs)
    torch.testing.assert_close(ours, golden["output.forward"], atol=1e-4, rtol=0)
    assert (checkpoint.denoiser("raw")(*inputs) - ours).abs().max() > 0.1
    assert checkpoint.state.class_names == tuple("0123456789")
    assert checkpoint.state.codec_origin == {"id": tiny_vae.name}
    assert checkpoint.state.data["file"] == "sit.pt" and len(checkpoint.state.data["sha256"]) == 64


def test_an_imported_dit_is_exact_and_samples_as_noise_on_the_vp_path(tmp_path, tiny_vae):
    weights, name = golden_weights("dit_model_sigma"), "DiT-tiny.pt"
    torch.save(weights, tmp_path / name)
    to, codec = tmp_path / "dit", f"--codec.path={tiny_vae}"
    main([str(tmp_path / name), "--to", str(to), "--heads=4", codec])
    golden = load_file(ROOT / "tests" / "golden" / "dit_model_sigma.safetensors")
    checkpoint = open_checkpoint(to)
    model = checkpoint.denoiser("ema").eval()
    t = 1 - (golden["input.t"].double() + 1) / 1000  # our time of their diffusion step
    both = model(golden["input.x"], t.float(), golden["input.y"])
    torch.testing.assert_close(both, golden["output.forward"], atol=2e-3, rtol=0)
    objective = checkpoint.config.objective
    assert (objective.interpolant, objective.prediction) == ("vp", "noise")
    options = ("--columns", 1, "--steps", 3, "--out", tmp_path / "dit.png")
    run_here("sample/grid.py", "--checkpoint", to, *options)
    with pytest.raises(UserError, match="does not say whether it is SiT or DiT; give --kind"):
        (tmp_path / name).rename(tmp_path / "model.pt")
        main([str(tmp_path / "model.pt"), "--to", str(tmp_path / "x"), "--heads=4", codec])


def test_dits_discrete_diffusion_follows_the_vp_path_closely():
    """Its log signal-to-noise ratio; beta from 1e-4 to 0.02 in 1,000 steps (Ho et al., 2020)."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    t = 1 - torch.arange(1, 1001, dtype=torch.float64) / 1000
    path = INTERPOLANTS["vp"](t)
    ours = (path.alpha_t**2 / path.sigma_t**2).log()
    assert (ours - (kept / (1 - kept)).log()).abs().max() < 0.1


def test_bare_weights_have_no_raw_ones_and_imagenet_names_if_there_are_1000_classes(
    tmp_path, tiny_vae
):
    weights = golden_weights("sit_model_nosigma")
    weights["y_embedder.embedding_table.weight"] = torch.randn(1001, 64)
    save_file(weights, tmp_path / "sit.safetensors")
    to = tmp_path / "sit"
    source = str(tmp_path / "sit.safetensors")
    main([source, "--to", str(to), "--heads=4", f"--codec.path={tiny_vae}", "--step=7000000"])
    checkpoint = open_checkpoint(to)
    assert checkpoint.state.class_names[207] == "n02099601"  # golden retriever
    assert checkpoint.state.step == 7_000_000
    with pytest.raises(UserError, match=r"weights 'raw' are not in .* which has ema_0.9999"):
        checkpoint.denoiser("raw")


def test_a_classifier_becomes_a_folder(tmp_path, capsys):
    torch.save({"model": golden_weights("vit5_classifier")}, tmp_path / "vit5.pth")
    main([str(tmp_path / "vit5.pth"), "--to", str(tmp_path / "vit5")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "vit5")
    golden = load_file(ROOT / "tests" / "golden" / "vit5_classifier.safetensors")
    logits = load_classifier(tmp_path / "vit5")(golden["input.images"])
    torch.testing.assert_close(logits, golden["output.logits"], atol=1e-4, rtol=0)


@pytest.fixture
def repa(tmp_path) -> Path:
    """A file as REPA's trainer writes it, with the fixture's weights."""
    weights = golden_weights("sit_model_nosigma")
    weights |= {f"projectors.0.{layer}.weight": torch.zeros(64, 64) for layer in (0, 2)}
    content = {"model": weights, "ema": weights, "opt": {}, "args": Namespace(lr=1e-4), "steps": 3}
    torch.save(content, tmp_path / "repa_sit.pt")
    return tmp_path / "repa_sit.pt"


def test_repa_is_converted_to_time_from_noise(tmp_path, repa, tiny_vae, capsys):
    """The fixture, taken for a network from data to noise, is the converted one at 1 - t."""
    main([str(repa), "--to", str(tmp_path / "r"), "--heads=4", f"--codec.path={tiny_vae}"])
    shown = capsys.readouterr().out
    assert "time reversed" in shown and "dropped: 2 tensors of REPA's projectors" in shown
    checkpoint = open_checkpoint(tmp_path / "r")
    golden = load_file(ROOT / "tests" / "golden" / "sit_model_nosigma.safetensors")
    x, t, y = (golden[f"input.{name}"] for name in "xty")
    for name in ("ema", "raw"):
        velocity = checkpoint.denoiser(name)(x, 1 - t, y)
        torch.testing.assert_close(velocity, -golden["output.forward"], atol=1e-4, rtol=0)
    assert checkpoint.state.data["time"] == "reversed"


def test_the_direction_of_time_may_be_given(tmp_path, repa, sit, tiny_vae):
    golden = load_file(ROOT / "tests" / "golden" / "sit_model_nosigma.safetensors")
    x, t, y = (golden[f"input.{name}"] for name in "xty")
    common = ["--heads=4", f"--codec.path={tiny_vae}"]
    plain = tmp_path / "iREPA-sit.pt"
    plain.write_bytes(sit.read_bytes())
    cases = {
        "a": (repa, "noise-to-data", t, 1),
        "b": (plain, "data-to-noise", 1 - t, -1),
        "c": (sit, "data-to-noise", 1 - t, -1),
    }
    for to, (file, direction, time, sign) in cases.items():
        main([str(file), "--to", str(tmp_path / to), *common, "--time", direction])
        velocity = open_checkpoint(tmp_path / to).denoiser("ema")(x, time, y)
        torch.testing.assert_close(velocity, sign * golden["output.forward"], atol=1e-4, rtol=0)
    with pytest.raises(UserError, match="time data-to-noise has no effect on DiT"):
        main([str(sit), "--to", str(tmp_path / "d"), *common, "--kind=dit", "--time=data-to-noise"])


@pytest.mark.parametrize(
    "name", ["repa_sit.pt", "SiT-XL-2-iREPA.pt", "sit-repa-e.pt", "sit_SRA.pt", "disploss-sit.pt"]
)
def test_derivatives_of_sit_ask_for_the_direction(tmp_path, sit, tiny_vae, name):
    (tmp_path / name).write_bytes(sit.read_bytes())
    arguments = ["--heads=4", f"--codec.path={tiny_vae}"]
    with pytest.raises(UserError, match="may be a SiT that runs from data to noise.*give --time"):
        main([str(tmp_path / name), "--to", str(tmp_path / "new"), *arguments])


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, sit, tiny_vae):
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    latin, credit, vit5, page = (
        tmp_path / name for name in ("latin.txt", "credit.pt", "vit5.pth", "page.pt")
    )
    latin.write_bytes("k\xe4se".encode("latin-1"))
    credit.write_bytes(sit.read_bytes())
    torch.save(golden_weights("vit5_classifier"), vit5)
    page.write_text("<html>")
    torch.save({"a.weight": torch.ones(1)}, tmp_path / "other.pt")
    to, heads = ["--to", str(tmp_path / "out")], "--heads=4"
    codec = f"--codec.path={tiny_vae}"
    cases = [
        ([str(tmp_path / "other.pt"), *to], "its keys start with a.weight"),
        ([str(tmp_path / "nothing.pt"), *to], "is no weights file"),
        ([str(sit), *to, codec], "no published size has width 64 and depth 3; give --heads"),
        ([str(sit), *to, codec, "--heads=5"], "not divisible by backbone.heads 5"),
        ([str(sit), *to, heads, "--codec.path=/nothing"], "cannot load the autoencoder"),
        ([str(sit), *to, heads, codec, f"--class-names={names}"], "2 names, the weights 10"),
        ([str(sit), *to, heads, codec, f"--class-names={latin}"], "is not UTF-8 text"),
        ([str(sit), *to, heads, "--codec.name=identity"], "for latents of 4 channels, the codec"),
        ([str(credit), *to, heads, codec], "credit.pt does not say whether it is SiT or DiT"),
        ([str(vit5), *to, f"--class-names={names}"], "no use for a classifier"),
        ([str(page), *to], "it is a web page, not the file; download the file itself"),
        ([str(sit), "--to", str(tmp_path)], "exists; choose another folder"),
    ]
    for argv, message in cases:
        with pytest.raises(UserError, match=message):
            main(argv)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_weights_without_a_null_label_keep_all_their_classes(tmp_path, sit, tiny_vae):
    names = tmp_path / "names.txt"
    names.write_text("\ufeff" + "\n".join(f"name {i}" for i in range(11)), encoding="utf-8")
    to = tmp_path / "all"
    arguments = [f"--codec.path={tiny_vae}", "--heads=4", f"--class-names={names}"]
    main([str(sit), "--to", str(to), *arguments])
    checkpoint = open_checkpoint(to)
    assert checkpoint.state.class_names[0] == "name 0" and len(checkpoint.state.class_names) == 11
    assert checkpoint.config.objective.class_dropout == 0  # so guidance is refused
    assert checkpoint.denoiser("ema").conditioning.labels.weight[11].abs().max() == 0
