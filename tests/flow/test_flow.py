"""Paths, predictions, times, loss and class dropout against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Gauss

from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.config import ObjectiveConfig
from sit_vit5.flow.interpolants import BETA_MAX, BETA_MIN, INTERPOLANTS
from sit_vit5.flow.loss import WEIGHTS, drop_labels, flow_loss, loss_weights
from sit_vit5.flow.predictions import PREDICTIONS, Flow
from sit_vit5.flow.times import TIMES, sampling_interval, shift_times, training_interval
from sit_vit5.training.flow_matching import Objective, training_times
from sit_vit5.utils.distributed import BatchPlan


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_a_path_runs_from_noise_to_data_exactly(name):
    start, end = INTERPOLANTS[name](torch.zeros(1)), INTERPOLANTS[name](torch.ones(1))
    if name == "vp":  # as published, a little data is left in the noise
        assert float(start.alpha_t) == pytest.approx(math.exp(-(BETA_MAX + BETA_MIN) / 4), 1e-5)
        assert float(start.sigma_t) == pytest.approx(1, abs=1e-4)
    else:
        assert (start.alpha_t, start.sigma_t) == (0, 1)
    assert (end.alpha_t, end.sigma_t) == (1, 0)


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_the_derivatives_are_those_of_the_path(name):
    t, h = torch.linspace(0.01, 0.99, 50, dtype=torch.float64), 1e-6
    before, at, after = (INTERPOLANTS[name](time) for time in (t - h, t, t + h))
    for value, derivative in (("alpha_t", "d_alpha_t"), ("sigma_t", "d_sigma_t")):
        slope = (getattr(after, value) - getattr(before, value)) / (2 * h)
        torch.testing.assert_close(slope, getattr(at, derivative), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["gvp", "vp"])
def test_variance_preserving_paths_preserve_it_and_vp_keeps_its_digits_near_the_data(name):
    t = 1 - torch.logspace(-6, 0, 50)
    path, exact = INTERPOLANTS[name](t), INTERPOLANTS[name](t.double())
    torch.testing.assert_close(path.alpha_t**2 + path.sigma_t**2, torch.ones(50))
    torch.testing.assert_close(path.sigma_t.double(), exact.sigma_t, rtol=1e-5, atol=0)


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_prediction_gives_velocity_score_and_data_of_a_gaussian(interpolant, prediction):
    gauss, flow = Gauss(interpolant), Flow(interpolant, prediction)
    x_t = torch.randn(20, 3, dtype=torch.float64)
    t = torch.linspace(0.02, 0.98, 20, dtype=torch.float64)
    output = gauss.output(prediction, x_t, t)
    torch.testing.assert_close(flow.velocity(output, x_t, t), gauss.output("velocity", x_t, t))
    torch.testing.assert_close(flow.score(output, x_t, t), gauss.output("score", x_t, t))
    torch.testing.assert_close(flow.data(output, x_t, t), gauss.output("data", x_t, t))


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
def test_a_velocity_tells_the_data_at_both_ends(interpolant):
    """At noise it is the mean of all data; by (x_t - sigma noise) / alpha it would be 0 / 0."""
    gauss, flow = Gauss(interpolant), Flow(interpolant, "velocity")
    x_t = torch.randn(2, 3, dtype=torch.float64)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    data = flow.data(gauss.output("velocity", x_t, t), x_t, t)
    torch.testing.assert_close(data, torch.stack([torch.full_like(x_t[0], gauss.mu), x_t[1]]))


def test_the_gaussian_itself_is_right():
    """Its density, by sampling; its velocity, by carrying that density."""
    gauss = Gauss("linear")
    t = torch.full((200_000,), 0.6)
    x_t = gauss.sample(t, torch.Generator().manual_seed(0))
    assert x_t.mean() == pytest.approx(0.6 * 0.5, abs=0.005)
    assert x_t.var() == pytest.approx(0.36**2 + 0.16, abs=0.005)
    one, step = torch.full((1,), 0.6, dtype=torch.float64), 1e-5
    x = torch.tensor([[0.7]], dtype=torch.float64)
    moved = x + step * gauss.output("velocity", x, one)
    deviations = [
        (x - gauss.mean(one)) / gauss.variance(one) ** 0.5,
        (moved - gauss.mean(one + step)) / gauss.variance(one + step) ** 0.5,
    ]
    torch.testing.assert_close(*deviations, atol=1e-8, rtol=0)


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
def test_velocity_from_the_network_has_a_score_at_both_ends_of_its_interval(interpolant):
    flow = Flow(interpolant, "velocity")
    for t in (0.0, sampling_interval(interpolant, "velocity")[1] - 1e-3):
        x_t, time = torch.randn(2, 3), torch.full((2,), t)
        score = flow.score(Gauss(interpolant).output("velocity", x_t, time), x_t, time)
        expected = Gauss(interpolant).output("score", x_t, time)
        torch.testing.assert_close(score, expected, atol=1e-2, rtol=1e-2)


LOSS = dict(labels=None, interpolant="linear")


def pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 0.5 * torch.randn(count, 1, 4, 4, generator=generator), torch.randn(
        count, 1, 4, 4, generator=generator
    )


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_of_the_exact_target_is_zero(interpolant, prediction):
    data, noise = pair(8)
    t = torch.linspace(0.1, 0.9, 8)
    path = INTERPOLANTS[interpolant](t.reshape(-1, 1, 1, 1))
    target = {
        "velocity": path.d_alpha_t * data + path.d_sigma_t * noise,
        "noise": noise,
        "score": -noise / path.sigma_t,
        "data": data,
    }[prediction]
    options = dict(noise=noise, t=t, labels=None, interpolant=interpolant, prediction=prediction)
    for weights in ("none", *WEIGHTS):
        exact = flow_loss(lambda x, t, y: target, data, weights=weights, **options)
        silent = flow_loss(lambda x, t, y: torch.zeros_like(x), data, weights=weights, **options)
        assert exact.shape == (8,) and exact.abs().max() < 1e-9 < silent.min()


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
@pytest.mark.parametrize("prediction", ["noise", "score", "data"])
def test_velocity_weights_make_every_loss_that_of_the_velocity(interpolant, prediction):
    """One guess of data and noise, written as each prediction."""
    data, noise = pair(8)
    t = torch.linspace(0.1, 0.9, 8)
    options = dict(noise=noise, t=t, labels=None, interpolant=interpolant)
    path = INTERPOLANTS[interpolant](t.reshape(-1, 1, 1, 1))
    x_t = path.alpha_t * data + path.sigma_t * noise
    guess = torch.randn(8, 1, 4, 4)
    velocity = Flow(interpolant, prediction).velocity(guess, x_t, t)
    expected = flow_loss(lambda *_: velocity, data, **options)
    found = flow_loss(lambda *_: guess, data, prediction=prediction, weights="velocity", **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interpolant", INTERPOLANTS)
@pytest.mark.parametrize("prediction", ["noise", "score", "data"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_bounded_weights_are_finite_on_the_whole_path(interpolant, prediction, weights):
    inside = torch.linspace(0, 1, 1001)
    near = torch.tensor([1e-30, 1e-12, 1e-7])
    t = torch.cat([inside, near, 1 - near])
    path = INTERPOLANTS[interpolant](t)
    unbounded = loss_weights(path, prediction, weights, None)
    bounded = loss_weights(path, prediction, weights, 20.0)
    assert bounded.isfinite().all() and (0 <= bounded).all() and bounded.max() <= 400
    low = unbounded <= 400  # also false where it is not a number
    assert torch.equal(bounded[low], unbounded[low]) and low.float().mean() > 0.7
    assert (bounded[~low] == 400).all()
    # Where it is infinite in the limit it is not 0.
    assert not unbounded.isnan().any() or (bounded[unbounded.isnan()] == 400).all()

    data = torch.randn(len(t), 1, 2, 2)
    output = torch.zeros_like(data).requires_grad_()
    losses = flow_loss(
        lambda *_: output, data, noise=torch.randn_like(data), t=t, labels=None,
        interpolant=interpolant, prediction=prediction, weights=weights, weights_bound=20.0,
    )  # fmt: skip
    losses.sum().backward()
    assert losses.isfinite().all() and output.grad.isfinite().all()
    assert losses.max() < 400 * 50


def test_the_bound_of_weights_is_jits():
    path = INTERPOLANTS["linear"](torch.tensor([0.5, 0.94, 0.95, 0.96, 1.0]))
    expected = 1 / (1 - torch.tensor([0.5, 0.94, 0.95, 0.95, 0.95])) ** 2
    torch.testing.assert_close(loss_weights(path, "data", "velocity", 20.0), expected)


def test_training_bounds_weights_as_configured():
    shape, plan = (1, 4, 4), BatchPlan(64, 1, 1, 0)
    losses = {}
    for bound in (20.0, 5.0, None):
        config = ObjectiveConfig(prediction="data", weights="velocity", weights_bound=bound)
        objective = Objective(config, "images", IdentityCodec(), plan, 0, shape, None)
        latents, labels = torch.zeros(64, *shape), torch.zeros(64, dtype=torch.long)
        losses[bound] = objective.loss(
            lambda x, t, y: torch.ones_like(x), latents, labels, step=0, micro=0
        )
    assert losses[5.0].max() == 25 and losses[20.0].max() == 400
    assert torch.equal(losses[5.0], losses[None].clamp(max=25)) and losses[None].max() > 400


def test_the_loss_of_zero_velocity_is_one_plus_the_data_power():
    data, noise = pair(4000)
    options = dict(noise=noise, t=torch.rand(4000), **LOSS)
    silent = flow_loss(lambda x, t, y: torch.zeros_like(x), data, **options)
    assert silent.mean() == pytest.approx(1 + 0.25, rel=0.02)


def test_loss_is_computed_per_sample_in_fp32():
    data = torch.zeros(2, 1, 2, 2)
    noise = torch.stack([torch.zeros(1, 2, 2), torch.full((1, 2, 2), 3.0)])
    losses = flow_loss(
        lambda x, t, y: torch.zeros_like(x).bfloat16(), data, noise=noise, t=torch.zeros(2), **LOSS
    )
    assert losses.tolist() == [0, 9] and losses.dtype == torch.float32


def test_labels_are_dropped_where_the_draw_falls_below_the_rate():
    labels, u = torch.tensor([4, 5, 6, 7]), torch.tensor([0.0, 0.099, 0.1, 0.9])
    dropped = drop_labels(labels, u, class_dropout=0.1, null_label=10)
    assert dropped.tolist() == [10, 10, 6, 7]
    assert drop_labels(labels, u, class_dropout=0.0, null_label=10).tolist() == labels.tolist()


@pytest.mark.parametrize("name", TIMES)
def test_times_stay_inside_the_unit_interval(name):
    u = torch.cat([torch.rand(1000), torch.tensor([0.0, 1 - 2**-24])])
    t = TIMES[name](u, 0.0, 1.0)
    assert 0 <= t.min() and t.max() <= 1 and t.isfinite().all() and t.dtype == torch.float32


def test_logit_normal_times_have_that_mean_and_deviation():
    u = (torch.arange(100_000) + 0.5) / 100_000
    logits = torch.logit(TIMES["logit_normal"](u, -0.5, 1.5).double())
    assert (logits.mean().item(), logits.std().item()) == pytest.approx((-0.5, 1.5), abs=1e-3)


def test_the_shift_is_sd3s_in_its_own_time():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    theirs = 3.0 * (1 - t) / (1 + (3.0 - 1) * (1 - t))  # Esser et al., 2024, eq. 23, at 1 - t
    torch.testing.assert_close(shift_times(t, 3.0), 1 - theirs)
    assert shift_times(t, 1) is t
    assert (shift_times(t, 3.0)[1:-1] < t[1:-1]).all()  # more time near the noise


@pytest.mark.parametrize(
    ("interpolant", "prediction", "training", "sampling"),
    [
        ("linear", "velocity", (0, 1), (0, 1)),
        ("gvp", "velocity", (0, 1), (0, 1)),
        ("linear", "score", (1e-3, 1 - 1e-3), (1e-3, 1 - 1e-3)),
        ("gvp", "data", (1e-3, 1 - 1e-3), (1e-3, 1 - 1e-3)),
        ("vp", "noise", (0, 1 - 1e-5), (0, 1 - 1e-3)),
        ("vp", "velocity", (0, 1 - 1e-5), (0, 1 - 1e-3)),
    ],
)
def test_intervals_keep_off_singular_ends(interpolant, prediction, training, sampling):
    assert training_interval(interpolant, prediction) == training
    assert sampling_interval(interpolant, prediction) == sampling
    start, end = sampling_interval(interpolant, prediction, diffusion="sbdm", last_step_size=0.04)
    assert end == 0.96
    assert start == (0 if interpolant == "vp" else 1e-3)  # sbdm is infinite where alpha is 0


def test_training_times_follow_distribution_shift_and_interval():
    u = torch.rand(1000)
    plain = training_times(u, ObjectiveConfig())
    assert torch.equal(plain, u)
    shifted = training_times(u, ObjectiveConfig(shift=3.0))
    torch.testing.assert_close(shifted, u / (u + 3 * (1 - u)))
    off_ends = training_times(u, ObjectiveConfig(prediction="score"))
    torch.testing.assert_close(off_ends, 1e-3 + (1 - 2e-3) * u)
    normal = training_times(u, ObjectiveConfig(times="logit_normal", times_mean=1.0))
    assert normal.mean() > 0.6
