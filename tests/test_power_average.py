"""Post-hoc averages against the paper's numbers and against averages that were tracked."""

from __future__ import annotations

import numpy as np
import pytest

from sit_vit5.utils.power_ema import Profile, combine, decay_at, shape_of, width_of

STEPS, STORED = 2000, (0.05, 0.1)


def snapshots(every: int, widths: tuple[float, ...] = STORED) -> list[Profile]:
    return [Profile(step, w) for step in range(every, STEPS + 1, every) for w in widths]


def track(values: np.ndarray, width: float) -> np.ndarray:
    """The average of a sequence after each step, (steps, ...)."""
    shape, average, found = shape_of(width), np.zeros(values.shape[1:]), []
    for step, value in enumerate(values):
        decay = decay_at(shape, step)
        average = decay * average + (1 - decay) * value
        found.append(average)
    return np.stack(found)


@pytest.fixture(scope="module")
def walk() -> np.ndarray:
    """64 random walks, as weights under small independent updates, (steps, 64)."""
    return np.random.default_rng(0).standard_normal((STEPS, 64)).cumsum(axis=0)


def test_shape_of_a_width_is_the_papers_and_turns_back():
    # EDM2, section 3.1: widths 0.05 and 0.10 are gamma 16.97 and 6.94.
    assert shape_of(0.05) == pytest.approx(16.97, abs=0.005)
    assert shape_of(0.10) == pytest.approx(6.94, abs=0.005)
    assert shape_of(12**-0.5) == pytest.approx(0, abs=1e-12)  # the uniform distribution's spread
    for width in (0.001, 0.05, 0.2, 0.28):
        assert width_of(shape_of(width)) == pytest.approx(width, rel=1e-12)


def test_first_decay_forgets_the_initial_value():
    assert decay_at(3.0, 0) == 0 and decay_at(3.0, 1) == 0.5**4


@pytest.mark.parametrize(("width", "residual"), [(0.03, 0.04), (0.07, 0.004), (0.15, 0.01)])
def test_combination_is_the_average_that_would_have_been_tracked(walk, width, residual):
    stored = snapshots(every=125)
    found = combine(stored, Profile(STEPS, width))
    tracked = {w: track(walk, w) for w in (*STORED, width)}
    made = sum(
        coefficient * tracked[profile.width][profile.step - 1]
        for coefficient, profile in zip(found.coefficients, stored, strict=True)
    )
    expected = tracked[width][-1]
    nearest = min(np.abs(tracked[w][-1] - expected).mean() for w in STORED)
    assert found.residual < residual
    # A walk's average moves by the difference of profiles' integrals, which is smoother still.
    assert np.abs(made - expected).mean() < residual * nearest


def test_residual_is_the_norm_of_the_profiles_difference():
    """Against a sum over a fine grid of t."""
    stored, target = snapshots(every=500), Profile(1500, 0.15)
    found = combine(stored, target)
    t = (np.arange(400_000) + 0.5) / 200  # (0, 2000]

    def profile(of: Profile) -> np.ndarray:
        shape = shape_of(of.width)
        return np.where(t <= of.step, (shape + 1) / of.step * (t / of.step) ** shape, 0)

    made = sum(x * profile(p) for x, p in zip(found.coefficients, stored, strict=True))
    difference, norm = made - profile(target), np.linalg.norm(profile(target))
    assert found.residual == pytest.approx(np.linalg.norm(difference) / norm, rel=1e-3)
    assert sum(found.coefficients) == pytest.approx(1, abs=1e-12)
    # No change of two coefficients that keeps the sum comes nearer.
    for one in (1e-3, -1e-3):
        moved = difference + one * (profile(stored[0]) - profile(stored[4]))
        assert np.linalg.norm(moved) > np.linalg.norm(difference)


def test_a_stored_average_is_taken_as_it_is():
    stored = snapshots(every=125)
    found = combine(stored, Profile(1000, 0.1))
    assert found.residual == 0
    assert found.coefficients == tuple(float(p == Profile(1000, 0.1)) for p in stored)


def test_solution_stays_sound_with_many_and_nearly_equal_profiles():
    crowd = snapshots(every=10, widths=(0.05, 0.0500001, 0.1))
    found = combine(crowd, Profile(STEPS, 0.13))
    assert found.residual < 1e-3 and np.abs(found.coefficients).max() < 2


def test_more_snapshots_match_better_and_far_widths_worse():
    residuals = [combine(snapshots(e), Profile(STEPS, 0.15)).residual for e in (1000, 500, 250)]
    assert residuals[0] > residuals[1] > residuals[2] and residuals[2] < 0.05 < residuals[1]
    assert combine(snapshots(1000), Profile(STEPS, 0.01)).residual > 0.5
