"""Likelihood of images: closed forms through a network that knows its data, and the command."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY, Gauss, command_environment, command_line
from torch import Tensor, nn

from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.evaluation.likelihood import (
    LEVELS_PER_UNIT,
    Draws,
    Summary,
    choose_images,
    encode,
    image_log_likelihood,
    probe_signs,
)
from sit_vit5.flow.predictions import Flow
from sit_vit5.sampling.generator import Generator, Settings
from sit_vit5.sampling.likelihood import bits_per_dimension
from sit_vit5.utils.errors import UserError

CPU = torch.device("cpu")
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 3, 2, 1)).astype(np.uint8)


class GaussModel(nn.Module):
    """The network that a perfect training on N(mu + label, s^2) pixels would give."""

    in_channels, input_size, num_classes, null_label = 1, (3, 2), 2, 2

    def __init__(self, interpolant: str, prediction: str):
        super().__init__()
        self.interpolant, self.prediction = interpolant, prediction
        self.unit = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        rows = [
            Gauss(self.interpolant, mu=-0.2 + 0.4 * int(label)).output(
                self.prediction, x.reshape(1, -1), time[None]
            )
            for x, time, label in zip(x_t, t, labels, strict=True)
        ]
        return self.unit * torch.cat(rows).reshape(x_t.shape)


def perfect(interpolant: str = "linear", prediction: str = "velocity", **options) -> Generator:
    settings = Settings(**{"method": "dopri5", "atol": 1e-6, "rtol": 1e-6, **options})
    model = GaussModel(interpolant, prediction)
    return Generator(model, IdentityCodec(), Flow(interpolant, prediction), settings)


def density(latents: Tensor, labels: list[int]) -> Tensor:
    means = torch.tensor([-0.2 + 0.4 * label for label in labels])[:, None, None, None]
    return torch.distributions.Normal(means, 0.6).log_prob(latents).flatten(1).sum(1)


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize(
    "method, steps",
    [("dopri5", None), ("rk4", 50), ("heun", 100), ("heun3", 50), ("midpoint", 100)],
)
def test_the_likelihood_of_images_is_the_gaussians_density(interpolant, method, steps):
    tolerances = {} if steps is None else {"atol": None, "rtol": None}
    generator = perfect(interpolant, method=method, steps=steps, **tolerances)
    labels, indices, draws = [0, 1, 1, 0, 2, 0], range(6), Draws(seed=0)
    nats, evaluations = image_log_likelihood(generator, IMAGES, labels, indices, draws)
    latents = encode(IdentityCodec(), IMAGES, indices, draws, device=CPU)
    torch.testing.assert_close(nats, density(latents, labels), atol=6e-3, rtol=0)
    other = density(latents, [1, 0, 0, 1, 0, 1])  # other labels, other densities
    assert (nats - other).abs().min() > 0.05
    if steps:
        assert evaluations == {"rk4": 4, "heun": 2, "heun3": 3, "midpoint": 2}[method] * steps


def test_tolerances_out_of_reach_are_refused():
    draws = Draws(0, uniform=False)
    with pytest.raises(UserError, match="dopri5 cannot reach atol 1e-300, rtol 1e-300 in fp32"):
        unreachable = perfect(atol=1e-300, rtol=1e-300)
        image_log_likelihood(unreachable, IMAGES[:1], [0], range(1), draws)


def test_bits_per_dimension_are_those_of_the_grey_levels_probabilities():
    """Each level's own probability; 128 for 127.5 levels per unit would be 0.0057 bits off."""
    labels, draws = [0] * 6, Draws(seed=0)
    nats, _ = image_log_likelihood(perfect(), IMAGES, labels, range(6), draws)
    found = bits_per_dimension(nats, 6, levels_per_unit=LEVELS_PER_UNIT)
    normal = torch.distributions.Normal(torch.tensor(-0.2, dtype=torch.float64), 0.6)
    grey = torch.from_numpy(IMAGES).double() / 127.5 - 1
    mass = normal.cdf(grey + 0.5 / 127.5) - normal.cdf(grey - 0.5 / 127.5)
    expected = -mass.log2().flatten(1).mean(1)
    torch.testing.assert_close(found.mean().double(), expected.mean(), atol=3e-3, rtol=0)
    exact, _ = image_log_likelihood(perfect(), IMAGES, labels, range(6), Draws(0, uniform=False))
    found = bits_per_dimension(exact, 6, levels_per_unit=LEVELS_PER_UNIT).double()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_dequantisation_stays_within_the_level_that_to_uint8_gives_back():
    from sit_vit5.codecs import to_uint8

    images = np.arange(256, dtype=np.uint8).repeat(40).reshape(40, 16, 16, 1)
    noisy = encode(IdentityCodec(), images, range(40), Draws(seed=0), device=CPU)
    assert (to_uint8(noisy).numpy() == images).all()
    level = (noisy - (torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1)) * 127.5
    assert level.mean().abs() < 0.01 and level.var().item() == pytest.approx(1 / 12, rel=0.05)
    still = encode(IdentityCodec(), images, range(40), Draws(0, uniform=False), device=CPU)
    assert (still == torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1).all()


def test_draws_belong_to_the_image_and_not_to_its_batch():
    for draw in (
        lambda seed, indices: probe_signs(Draws(seed, 2), (1, 3, 2), indices).swapaxes(0, 1),
        lambda seed, indices: encode(
            IdentityCodec(), IMAGES[list(indices)], indices, Draws(seed), device=CPU
        ).numpy(),
    ):
        whole = draw(0, range(6))
        assert (whole[[4, 1]] == draw(0, [4, 1])).all()
        assert (whole != draw(1, range(6))).any()
        assert len(np.unique(whole.reshape(6, -1), axis=0)) == 6
    signs = probe_signs(Draws(0, 3), (1, 20, 20), range(5))
    assert signs.shape == (3, 5, 1, 20, 20) and set(np.unique(signs)) == {-1, 1}
    assert abs(signs.mean()) < 0.05 and len(np.unique(signs.reshape(15, -1), axis=0)) == 15


def test_more_images_begin_with_the_same_ones():
    few, all_of_them = choose_images(50, 5, seed=0), choose_images(50, 0, seed=0)
    assert all_of_them[:5] == few and sorted(all_of_them) == list(range(50)) != all_of_them
    assert choose_images(50, 5, seed=1) != few
    with pytest.raises(UserError, match="num_images 51 must be at most 50"):
        choose_images(50, 51, seed=0)


def test_the_standard_error_is_of_the_mean():
    summary = Summary.of([1.0, 2.0, 3.0, 6.0])
    assert (summary.mean, summary.error) == (3.0, pytest.approx(math.sqrt(14 / 3 / 4)))
    assert Summary.of([1.0]).error is None and str(Summary.of([1.0])) == "1.0000"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of the tiny configuration."""
    return train(tmp_path_factory.mktemp("runs"))


def train(folder: Path, *arguments: object) -> Path:
    subprocess.run(
        command_line("train_sit.py", *TINY, "--output-dir", folder, "--steps", 4, *arguments),
        cwd=ROOT, env=command_environment(), check=True, capture_output=True,
    )  # fmt: skip
    return folder / "tiny"


def measured(run: Path, out: Path, *argv: object, data: object = "digits:held-out") -> dict:
    """evaluate/likelihood.py in this process: its start costs more than its work."""
    main = runpy.run_path(str(ROOT / "evaluate" / "likelihood.py"))["main"]
    arguments = ["--checkpoint", run, "--data", data, "--out", out / "l.json"]
    main(
        [*map(str, arguments + ["--num-images", 5] * ("--num-images" not in argv)), *map(str, argv)]
    )
    return json.loads((out / "l.json").read_text())


def test_the_command_prints_and_writes_the_likelihood(trained, tmp_path, capsys):
    found = measured(trained, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(tmp_path / "l.json")
    assert "5 images of digits:held-out, given the class" in shown[0]
    assert f"{found['nats_per_image']:.4f} +- {found['nats_standard_error']:.4f}" in shown[1]
    assert found["nats_per_image"] == pytest.approx(np.mean(found["nats"]))
    bits = -found["nats_per_image"] / 64 / math.log(2) + math.log2(127.5)
    assert found["bits_per_dimension"] == pytest.approx(bits, rel=1e-6)
    assert (found["dimensions"], found["dequantize"], found["notes"]) == (64, "uniform", [])
    from sit_vit5.data.array_sources import Digits

    held_out = Digits("held-out")
    assert found["labels"] == held_out.labels[found["indices"]].tolist()


def test_values_depend_on_neither_batch_nor_processes(trained, tmp_path):
    fixed = ("--method", "heun", "--steps", 3)
    whole = measured(trained, tmp_path, *fixed)
    parts = measured(trained, tmp_path, *fixed, "--batch-size", 2)
    assert parts["nats"] == pytest.approx(whole["nats"], abs=1e-3)
    assert parts["indices"] == whole["indices"]
    command = command_line(
        "evaluate/likelihood.py", "--checkpoint", trained, "--data", "digits:held-out", *fixed,
        "--num-images", 5, "--batch-size", 2, "--out", tmp_path / "two.json", processes=2,
    )  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=command_environment(), check=True, capture_output=True)
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["nats"] == parts["nats"] and two["indices"] == parts["indices"]


def test_every_option_changes_the_value(trained, tmp_path):
    found = {}
    for options in (
        (), ("--probes", 2), ("--dequantize", "none"), ("--null-label", True), ("--seed", 1),
        ("--weights", "raw"), ("--method", "euler", "--steps", 2), ("--precision", "bf16"),
        ("--method", "euler", "--steps", 3), ("--rtol", 0.5, "--atol", 0.5),
    ):  # fmt: skip
        found[options] = measured(trained, tmp_path, *options)
    values = {tuple(result["nats"]) for result in found.values()}
    assert len(values) == len(found)
    assert found["--null-label", True]["labels"] == [10] * 5
    assert not found["--null-label", True]["conditional"]
    assert "not a bound" in found["--dequantize", "none"]["notes"][0]


def test_latents_get_bits_per_latent_dimension_and_say_so(tiny_vae, image_folder, tmp_path, capsys):
    run = train(
        tmp_path, "--codec.name", "sd-vae-ema", "--codec.path", tiny_vae, "--data.source",
        "folder", "--data.path", image_folder, "--batch-size", 4, "--data.image-size", 8,
    )  # fmt: skip
    found = measured(run, tmp_path, data=image_folder)
    assert "bits_per_dimension" not in found and found["dequantize"] == "none"
    bits = -found["nats_per_image"] / (4 * 4 * 4) / math.log(2)
    assert found["bits_per_latent_dimension"] == pytest.approx(bits, rel=1e-6)
    shown = capsys.readouterr().out
    assert "bits per latent dimension" in shown and "not bits per pixel" in shown
    assert sorted(set(found["labels"])) == [0, 1]
    with pytest.raises(UserError, match="dequantize uniform is for models of pixels"):
        measured(run, tmp_path, "--dequantize", "uniform", data=image_folder)
    with pytest.raises(UserError, match="digits has images of"):
        measured(run, tmp_path, data="digits")


def test_an_unconditional_model_needs_no_classes(image_folder, tmp_path):
    run = train(tmp_path, "--data.unconditional", True, "--data.source", "digits")
    found = measured(run, tmp_path)
    assert not found["conditional"] and found["labels"] == [0] * 5
    with pytest.raises(UserError, match="the model has no classes"):
        measured(run, tmp_path, "--null-label", True)


WRONG = [
    (["--steps", 3], "steps 3 has no effect: dopri5 chooses its steps"),
    (["--method", "heun", "--rtol", 0.1], "rtol 0.1 has no effect: heun has a fixed grid"),
    (["--probes", 0], "probes 0 must be at least 1"),
    (["--num-images", 361], "num_images 361 must be at most 360"),
    (["--weights", "ema_0.5"], "weights 'ema_0.5' are not in"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=lambda part: str(part)[:24])
def test_wrong_options_are_refused_in_one_line(trained, argv, message, tmp_path):
    with pytest.raises(UserError) as error:
        measured(trained, tmp_path, *argv)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_data_of_other_classes_or_size_is_refused(trained, image_folder, tmp_path):
    with pytest.raises(UserError, match="has images of"):
        measured(trained, tmp_path, data=image_folder)
    with pytest.raises(UserError, match="absent does not exist"):
        measured(trained, tmp_path, data="absent")


def test_images_come_from_any_source_but_not_from_a_latent_cache(trained, tmp_path, monkeypatch):
    from sit_vit5.data.array_sources import Digits

    held_out = Digits("held-out")
    np.savez(tmp_path / "set.npz", images=held_out.images, labels=held_out.labels)
    found = measured(trained, tmp_path, data=tmp_path / "set.npz")
    assert found["nats"] == measured(trained, tmp_path)["nats"]
    cache = SimpleNamespace(kind="moments")
    monkeypatch.setattr("sit_vit5.evaluation.likelihood.build_source", lambda data: cache)
    with pytest.raises(UserError, match="is a latent cache; give the images"):
        measured(trained, tmp_path, data=tmp_path / "cache")
