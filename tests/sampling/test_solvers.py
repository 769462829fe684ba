"""Solvers, SDEs, guidance and likelihood against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Gauss, tiny_denoiser

from sit_vit5.config import ADAPTIVE_METHODS
from sit_vit5.flow.interpolants import INTERPOLANTS
from sit_vit5.flow.predictions import Flow
from sit_vit5.flow.times import sampling_interval
from sit_vit5.sampling.field import (
    SCHEDULES,
    Field,
    Guidance,
    Network,
    guidance_scale_or_default,
    guided,
    interval_in_steps,
    interval_in_time,
    time_of_noise_level,
)
from sit_vit5.sampling.likelihood import bits_per_dimension, divergence, log_likelihood
from sit_vit5.sampling.ode import SOLVERS, adaptive, shifted_grid, uniform_grid
from sit_vit5.sampling.sde import DIFFUSIONS, LAST_STEPS, SDE_SOLVERS, Sde
from sit_vit5.utils.errors import UserError

ORDERS = {"euler": 1, "midpoint": 2, "heun": 2, "heun3": 3, "rk4": 4, "ab2": 2}
EXACT = math.exp(math.sin(1))  # x(1) of dx/dt = x cos(t), x(0) = 1


def cosine(x: torch.Tensor, t: float) -> torch.Tensor:
    return x * math.cos(t)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("method", SOLVERS)
def test_a_solver_converges_with_its_order_on_any_grid(method, shift):
    def error(steps: int) -> float:
        x = torch.ones(1, dtype=torch.float64)
        end = SOLVERS[method](cosine, x, shifted_grid(steps, (0.0, 1.0), shift))
        return abs(end.item() - EXACT)

    coarse = 40 if ORDERS[method] > 2 else 400  # rounding ends the order of the higher ones

    assert math.log2(error(coarse) / error(2 * coarse)) == pytest.approx(ORDERS[method], abs=0.1)


@pytest.mark.parametrize("method", SOLVERS)
def test_a_solver_runs_back_to_where_it_started(method):
    x = torch.ones(1, dtype=torch.float64)
    there = SOLVERS[method](cosine, x, uniform_grid(400))
    back = SOLVERS[method](cosine, there, uniform_grid(400)[::-1])
    assert back.item() == pytest.approx(1, abs=5e-3)


@pytest.mark.parametrize("method", ADAPTIVE_METHODS)
def test_adaptive_methods_keep_their_tolerance_inside_the_interval(method):
    asked = []

    def field(x: torch.Tensor, t: float) -> torch.Tensor:
        asked.append(t)
        return cosine(x, t)

    x = torch.ones(1, dtype=torch.float64)
    end = adaptive(field, x, (0.0, 1.0), method=method, atol=1e-7, rtol=1e-7)
    assert end.item() == pytest.approx(EXACT, abs=5e-5)
    assert 0 <= min(asked) and max(asked) <= 1
    back = adaptive(field, end, (1.0, 0.0), method=method, atol=1e-7, rtol=1e-7)
    assert back.item() == pytest.approx(1, abs=5e-5)


def test_grids_have_their_steps_and_end_exactly():
    assert uniform_grid(4) == [0, 0.25, 0.5, 0.75, 1]
    assert uniform_grid(3, (0.001, 0.999))[-1] == 0.999
    shifted = shifted_grid(4, (0.0, 1.0), 3.0)
    assert shifted == pytest.approx([0, 0.1, 0.25, 0.5, 1])
    assert shifted_grid(4, (0.0, 0.5), 3.0) == pytest.approx([0, 0.05, 0.125, 0.25, 0.5])


def gauss_field(interpolant: str, prediction: str = "velocity") -> Field:
    gauss = Gauss(interpolant)

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        return gauss.output(prediction, x, torch.full((len(x),), t, dtype=x.dtype))

    return Field(predict, Flow(interpolant, prediction))


@pytest.mark.parametrize("prediction", ["velocity", "score", "noise", "data"])
@pytest.mark.parametrize("interpolant", INTERPOLANTS)
def test_an_ode_carries_noise_to_the_gaussian(interpolant, prediction):
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    interval = sampling_interval(interpolant, prediction)
    end = SOLVERS["rk4"](gauss_field(interpolant, prediction), x, uniform_grid(200, interval))
    gauss = Gauss(interpolant)
    start, stop = (torch.tensor([t], dtype=torch.float64) for t in interval)
    ratio = (gauss.variance(stop) / gauss.variance(start)) ** 0.5
    expected = gauss.mean(stop) + ratio * (x - gauss.mean(start))
    torch.testing.assert_close(end, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("diffusion", DIFFUSIONS)
@pytest.mark.parametrize("method", SDE_SOLVERS)
def test_an_sde_ends_with_the_moments_of_the_gaussian(method, diffusion):
    """On every path the noise keeps mean and variance; w/2 for w would change the variance."""
    generator = torch.Generator().manual_seed(0)
    for interpolant in INTERPOLANTS:
        sde = Sde(gauss_field(interpolant), diffusion)
        interval = sampling_interval(
            interpolant, "velocity", diffusion=diffusion, last_step_size=0.04
        )
        # sbdm is infinite at noise on two paths: it starts 0.05 away here, for so few steps.
        start = max(interval[0], 0.05) if diffusion == "sbdm" else interval[0]
        x = Gauss(interpolant).sample(torch.full((6_000,), start), generator).double()
        noise = lambda step: torch.randn(x.shape, generator=generator)  # noqa: B023, E731
        x = SDE_SOLVERS[method](sde, x, uniform_grid(100, (start, 0.96)), noise)
        t = torch.tensor([0.96], dtype=torch.float64)
        gauss = Gauss(interpolant)
        assert x.mean().item() == pytest.approx(gauss.mean(t).item(), abs=0.03)
        assert x.var().item() == pytest.approx(gauss.variance(t).item(), rel=0.08)


def test_diffusion_coefficients_are_sits_and_scale_with_their_norm():
    sde = {name: Sde(gauss_field("linear"), name, 0.5) for name in DIFFUSIONS}
    found = {name: sde[name].coefficient(0.25) for name in DIFFUSIONS}
    assert found == pytest.approx(
        {
            "constant": 0.5,
            "sbdm": 0.5 * (0.75**2 / 0.25 + 0.75),
            "sigma": 0.5 * 0.75,
            "linear": 0.5 * 0.75,
            "decreasing": 0.25 * (0.5 * math.cos(math.pi / 4) + 1) ** 2,
            "increasing-decreasing": 0.5 * math.sin(math.pi / 4) ** 2,
        }
    )


def test_last_steps_are_their_formulas():
    field, x, t = gauss_field("linear"), torch.tensor([[0.3]], dtype=torch.float64), 0.9
    sde, time = Sde(field, "sigma"), torch.tensor([0.9], dtype=torch.float64)
    velocity, score = (Gauss("linear").output(name, x, time) for name in ("velocity", "score"))
    expected = {
        "mean": x + 0.1 * (velocity + 0.1 * score),
        "euler": x + 0.1 * velocity,
        "tweedie": Gauss("linear").output("data", x, time),
    }
    for name, step in LAST_STEPS.items():
        torch.testing.assert_close(step(sde, x, t, 0.1), expected[name])


def predictions(scale: float, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guided, conditional and null predictions of two-channel latents at t = 0.3."""
    model = tiny_denoiser()
    x, labels = torch.randn(3, 1, 4, 6), torch.tensor([0, 1, 2])
    t = torch.full((3,), 0.3)
    made = guided(Network(model), labels, Guidance(scale, **options))(x, 0.3)
    null = torch.full((3,), model.null_label)
    return made, model(x, t, labels), model(x, t, null)


def test_guidance_extrapolates_from_the_null_to_the_class():
    for scale in (0.0, 1.0, 2.5):
        made, conditional, null = predictions(scale)
        expected = null + scale * (conditional - null)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    made, conditional, _ = predictions(2.5, interval=(0.4, 1.0))
    torch.testing.assert_close(made, conditional)


def test_guidance_of_the_first_channels_leaves_the_others_conditional():
    class Fake:
        model = type("Model", (), {"null_label": 3})
        calls = 0

        def __call__(self, x, t, labels):
            self.calls += 1
            return labels[:, None, None, None].float().expand(-1, 4, 2, 2)

    x, labels = torch.zeros(2, 4, 2, 2), torch.tensor([0, 1])
    made = guided(Fake(), labels, Guidance(2.0, channels=3))(x, 0.5)
    assert made[:, :, 0, 0].tolist() == [[-3, -3, -3, 0], [-1, -1, -1, 1]]
    worse = Fake()
    made = guided(Fake(), labels, Guidance(2.0), reference=worse)(x, 0.5)
    assert worse.calls == 1 and made[:, 0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_have_the_scale_as_their_mean_over_the_interval(schedule):
    guidance = Guidance(4.0, interval=(0.2, 0.6), schedule=schedule)
    places = [0.2 + 0.4 * (i + 0.5) / 1000 for i in range(1000)]
    assert sum(map(guidance.scale_at, places)) / 1000 == pytest.approx(4.0, rel=1e-4)
    assert guidance.scale_at(0.19) == guidance.scale_at(0.61) == 1
    rising = [guidance.scale_at(t) for t in (0.25, 0.4, 0.55)]
    assert rising == sorted(rising) and (schedule == "constant") == (rising[0] == rising[2])


def test_guidance_needs_a_null_label_that_training_has_shown():
    guidable = {"class_names": ("a",), "class_dropout": 0.1}
    assert guidance_scale_or_default(None, **guidable) == 2
    assert guidance_scale_or_default(None, default=1.0, **guidable) == 1
    assert guidance_scale_or_default(3.5, **guidable) == 3.5
    for model, reason in (
        ({"class_names": (), "class_dropout": 0.1}, "has no classes"),
        ({"class_names": ("a",), "class_dropout": 0.0}, "class_dropout 0"),
    ):
        assert guidance_scale_or_default(None, **model) == 1
        assert guidance_scale_or_default(1, **model) == 1
        with pytest.raises(UserError, match=reason):
            guidance_scale_or_default(2, **model)


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
def test_noise_levels_become_the_times_that_have_them(interpolant):
    for t in (0.1, 0.5, 0.9):
        path = INTERPOLANTS[interpolant](torch.tensor(t, dtype=torch.float64))
        level = float(path.sigma_t / path.alpha_t)
        assert time_of_noise_level(level, interpolant) == pytest.approx(t, abs=1e-9)
    assert time_of_noise_level(1.0, "linear") == pytest.approx(0.5)
    low, high = interval_in_time((0.25, 3.0), "sigma", interpolant="linear")
    assert (low, high) == pytest.approx((0.25, 0.8))


def test_step_numbers_are_whole_and_of_the_grid():
    assert interval_in_steps((2, 5), 10) == (2, 5)
    for interval, steps, message in (
        ((2, 10), 10, r"steps in 0..9"),
        ((0.5, 3), 10, r"steps in 0..9"),
        ((0, 1), None, "needs a fixed-step method"),
    ):
        with pytest.raises(UserError, match=message):
            interval_in_steps(interval, steps)


def test_the_divergence_of_a_linear_field_is_its_trace():
    matrix = torch.randn(5, 5, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)
    every = 5**0.5 * torch.eye(5, dtype=torch.float64)[:, None].expand(5, 4, 5)
    velocity, total = divergence(lambda x, t: x @ matrix, x, 0.5, every)
    torch.testing.assert_close(velocity, x @ matrix)
    torch.testing.assert_close(total, matrix.trace().expand(4))
    signs = torch.randint(0, 2, (20_000, 1, 5)).double() * 2 - 1
    _, total = divergence(lambda x, t: x @ matrix, x[:1], 0.5, signs)
    assert total.item() == pytest.approx(matrix.trace().item(), abs=0.15)


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize("method, steps", [("rk4", 100), ("dopri5", None)])
def test_the_likelihood_of_a_gaussian_is_its_density(interpolant, method, steps):
    data = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
    probes = torch.ones(1, 4, 3, dtype=torch.float64)  # exact: the Jacobian is diagonal
    result = log_likelihood(
        gauss_field(interpolant), data, lambda i: probes, interval=(0.0, 1.0),
        method=method, steps=steps, atol=1e-8, rtol=1e-8,
    )  # fmt: skip
    expected = torch.distributions.Normal(0.5, 0.6).log_prob(data).sum(1)
    torch.testing.assert_close(result.logp, expected, atol=1e-4, rtol=0)


def test_bits_per_dimension_of_uniform_noise_over_all_levels_are_eight():
    width = 256 / 127.5  # of all levels, each as wide as the uniform noise
    logp = torch.tensor([-10 * math.log(width)])  # ten dimensions
    assert bits_per_dimension(logp, 10).item() == pytest.approx(8)
