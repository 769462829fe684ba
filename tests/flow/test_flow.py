"""Path, loss and class dropout against closed forms."""

from __future__ import annotations

import pytest
import torch

from sit_vit5.flow.interpolants import INTERPOLANTS, interpolate
from sit_vit5.flow.loss import drop_labels, flow_loss
from sit_vit5.flow.times import TIMES


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_interpolant_runs_from_noise_to_data(name):
    data, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    at_noise, _ = interpolate(name, data, noise, torch.zeros(2))
    at_data, _ = interpolate(name, data, noise, torch.ones(2))
    torch.testing.assert_close(at_noise, noise, atol=1e-6, rtol=0)
    torch.testing.assert_close(at_data, data, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_velocity_is_the_derivative_of_the_path(name):
    data, noise = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    t, h = torch.tensor([0.3, 0.8], dtype=torch.float64), 1e-6
    before, _ = interpolate(name, data, noise, t - h)
    after, _ = interpolate(name, data, noise, t + h)
    _, velocity = interpolate(name, data, noise, t)
    torch.testing.assert_close((after - before) / (2 * h), velocity, atol=1e-8, rtol=1e-6)


def test_linear_velocity_is_data_minus_noise():
    data, noise = torch.randn(2, 3), torch.randn(2, 3)
    _, velocity = interpolate("linear", data, noise, torch.rand(2))
    torch.testing.assert_close(velocity, data - noise)


def test_loss_of_the_exact_velocity_is_zero_and_of_zero_is_one_plus_the_data_power():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4000, 1, 4, 4, generator=generator) * 0.5
    noise = torch.randn(4000, 1, 4, 4, generator=generator)
    settings = dict(noise=noise, t=torch.rand(4000), labels=None, interpolant="linear")
    perfect = flow_loss(lambda x, t, y: data - noise, data, **settings)
    silent = flow_loss(lambda x, t, y: torch.zeros_like(x), data, **settings)
    assert perfect.shape == (4000,) and perfect.abs().max() == 0
    assert silent.mean() == pytest.approx(1 + 0.25, rel=0.02)


def test_loss_is_computed_per_sample_in_fp32():
    data = torch.zeros(2, 1, 2, 2)
    noise = torch.stack([torch.zeros(1, 2, 2), torch.full((1, 2, 2), 3.0)])
    losses = flow_loss(
        lambda x, t, y: torch.zeros_like(x).bfloat16(),
        data,
        noise=noise,
        t=torch.zeros(2),
        labels=None,
        interpolant="linear",
    )
    assert losses.tolist() == [0, 9] and losses.dtype == torch.float32


def test_labels_are_dropped_where_the_draw_falls_below_the_rate():
    labels, u = torch.tensor([4, 5, 6, 7]), torch.tensor([0.0, 0.099, 0.1, 0.9])
    dropped = drop_labels(labels, u, class_dropout=0.1, null_label=10)
    assert dropped.tolist() == [10, 10, 6, 7]
    assert drop_labels(labels, u, class_dropout=0.0, null_label=10).tolist() == labels.tolist()


@pytest.mark.parametrize("name", TIMES)
def test_times_stay_inside_the_unit_interval(name):
    t = TIMES[name](torch.rand(1000))
    assert 0 <= t.min() and t.max() <= 1
