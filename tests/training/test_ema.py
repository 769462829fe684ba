"""Averages against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sit_vit5.config import EmaConfig
from sit_vit5.training.ema import Ema, rules
from sit_vit5.utils.power_ema import shape_of


class Counter(nn.Module):
    """One weight that the test moves, and buffers that must be copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))


def test_average_after_k_steps_is_the_closed_form_sum():
    model, decay = Counter(), 0.9
    ema = Ema(model, EmaConfig((decay,), warmup=False))
    for step in range(20):
        model.weight.data.fill_(step + 1.0)
        ema.update(model, step)
    expected = sum((1 - decay) * decay ** (19 - i) * (i + 1) for i in range(20))
    assert ema.averages["ema_0.9"]["weight"][0].item() == pytest.approx(expected, rel=1e-6)


def test_warm_up_starts_low_and_ends_at_the_decay():
    rule = rules(EmaConfig((0.9, 0.9999), warmup=True))
    assert rule["ema_0.9999"](0) == pytest.approx(0.1)
    assert rule["ema_0.9999"](90) == pytest.approx(0.91)
    assert rule["ema_0.9"](1000) == 0.9
    # The wrong code of a known bug overwrote the decay itself: it must still be there.
    assert rule["ema_0.9999"](10**6) == 0.9999


@pytest.mark.parametrize("width", [0.02, 0.1, 0.25])
def test_power_function_average_is_the_closed_form_sum(width):
    """Weight i of T counts as the integral of its interval: (i^(g+1) - (i-1)^(g+1)) / T^(g+1)."""
    model, steps, power = Counter(), 200, shape_of(width) + 1
    ema = Ema(model, EmaConfig((0.9,), widths=(width,), snapshot_every=1))
    values = torch.randn(steps, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step in range(steps):
        model.weight.data.fill_(values[step])
        ema.update(model, step)
    ends = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** power
    expected = (ends.diff() * values).sum().item()
    average = ema.averages[f"ema_width_{width}"]["weight"][0].item()
    assert average == pytest.approx(expected, abs=1e-6)
    # Spread of the weights over the steps: the relative width itself, but for the grid of steps.
    middle = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    mean = (ends.diff() * middle).sum()
    assert (ends.diff() * (middle - mean) ** 2).sum().sqrt() == pytest.approx(width, rel=0.01)


def test_power_function_average_of_the_first_step_is_its_weights():
    model = Counter()
    ema = Ema(model, EmaConfig((), widths=(0.1,), snapshot_every=1))
    model.weight.data.fill_(5.0)
    ema.update(model, 0)
    assert (ema.averages["ema_width_0.1"]["weight"] == 5).all() and ema.young(1) == []


def test_warm_average_of_constant_weights_is_those_weights():
    model = Counter()
    ema = Ema(model, EmaConfig((0.9999,), warmup=True))
    model.weight.data.fill_(5.0)
    for step in range(200):
        ema.update(model, step)
    assert (ema.averages["ema_0.9999"]["weight"] - 5).abs().max() < 1e-3


def test_several_decays_move_apart():
    model = Counter()
    ema = Ema(model, EmaConfig((0.5, 0.9), warmup=False))
    model.weight.data.fill_(1.0)
    ema.update(model, 0)
    assert [ema.averages[f"ema_{d}"]["weight"][0].item() for d in (0.5, 0.9)] == pytest.approx(
        [0.5, 0.1]
    )


def test_integers_are_copied_and_constants_stay_exact():
    model = Counter()
    model.weight.data = torch.tensor([0.1, 1 / 3, 7.0])
    ema = Ema(model, EmaConfig((0.9999,), warmup=False))
    for step in range(50):
        model.count += 1
        ema.update(model, step)
    assert ema.averages["ema_0.9999"]["count"].item() == 50
    assert (ema.averages["ema_0.9999"]["weight"] == model.weight).all()


def test_average_is_fp32_and_moves_for_bf16_weights():
    model = Counter().bfloat16()
    ema = Ema(model, EmaConfig((0.9999,), warmup=False))
    model.weight.data.fill_(1.0)
    for step in range(100):
        ema.update(model, step)
    average = ema.averages["ema_0.9999"]["weight"]
    assert average.dtype == torch.float32
    assert average[0].item() == pytest.approx(1 - 0.9999**100, rel=1e-4)


def test_a_model_with_other_names_is_an_error():
    ema = Ema(Counter(), EmaConfig((0.9,), warmup=False))
    with pytest.raises(RuntimeError, match="different names"):
        ema.update(nn.Linear(2, 2), 0)


def test_young_averages_are_named_until_they_forget_the_start():
    ema = Ema(Counter(), EmaConfig((0.9, 0.999), warmup=False))
    assert ema.young(50) == [0.999] and ema.young(5000) == []
    assert Ema(Counter(), EmaConfig((0.999,), warmup=True)).young(5) == []


def test_averages_never_require_gradients():
    ema = Ema(Counter(), EmaConfig((0.9,), warmup=False))
    assert not any(t.requires_grad for t in ema.averages["ema_0.9"].values())
