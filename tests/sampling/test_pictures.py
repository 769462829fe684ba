"""Denoising paths and interpolations: their states, their ends, their files."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import tiny_denoiser
from PIL import Image

from sit_vit5.analysis.interpolation import (
    BetweenSeeds,
    between_classes,
    draw_interpolation_frames,
    draw_interpolation_strip,
    interpolate,
    position_names,
    slerp,
)
from sit_vit5.analysis.trajectory import (
    TrajectoryState,
    denoising_path,
    draw_path_frames,
    draw_path_strip,
)
from sit_vit5.codecs import build_codec
from sit_vit5.config import ADAPTIVE_METHODS, SDE_METHODS, SdeConfig
from sit_vit5.flow.predictions import Flow
from sit_vit5.sampling.field import Guidance
from sit_vit5.sampling.generator import Generator, Settings
from sit_vit5.sampling.grid import TILE, decimals, sample_grid, save_animation
from sit_vit5.sampling.ode import SOLVERS
from sit_vit5.utils import rng
from sit_vit5.utils.errors import UserError

FIXED = {"steps": 6}
NOISY = {"steps": 6, "sde": SdeConfig()}
STEPLESS = {"steps": None, "atol": 1e-5, "rtol": 1e-3}
METHODS = [
    *((method, FIXED) for method in SOLVERS),
    *((method, STEPLESS) for method in ADAPTIVE_METHODS),
    *((method, NOISY) for method in SDE_METHODS),
    *((method, {"steps": 6, "sde": SdeConfig(last_step="none")}) for method in SDE_METHODS),
]


def generator(flow: Flow | None = None, **changes) -> Generator:
    settings = Settings(**{"method": "heun", "steps": 4, "guidance": Guidance(1.5)} | changes)
    flow = flow or Flow("linear", "velocity")
    return Generator(tiny_denoiser(), build_codec("identity"), flow, settings)


def seeded(made: Generator, seed: int) -> Generator:
    return replace(made, settings=replace(made.settings, seed=seed))


@pytest.mark.parametrize(("method", "changes"), METHODS)
def test_a_path_runs_from_the_noise_to_the_generators_image_in_rising_times(method, changes):
    made = generator(method=method, **changes)
    path = denoising_path(made, [0, 1], [2, 0], frames=4)
    assert len(path) == 4
    assert all(before.t < after.t for before, after in pairwise(path))
    last_step = "sde" not in changes or changes["sde"].last_step != "none"
    assert path[0].t == 0 and (path[-1].t == 1 or not last_step)
    assert (path[0].x_t == made.pixels(made.noise("sample", [0, 1])).numpy()).all()
    images = made([0, 1], [2, 0]).pixels.numpy()
    assert (path[-1].x_t == images).all() and (path[-1].data == images).all()


@pytest.mark.parametrize(("method", "changes"), METHODS)
def test_an_observer_sees_the_state_after_every_step(method, changes):
    """Also of adaptive methods, whose rejected steps go back; Heun's predictor is no state."""
    made, seen = generator(method=method, **changes), []
    field, _ = made.field(torch.tensor([0]))
    noise = made.noise("sample", [0])
    end = made.solve(field, noise, [0], observe=lambda x_t, t: seen.append((t, x_t)))
    assert seen[0][1] is noise and (seen[-1][1] == end).all()
    assert all(before[0] < after[0] for before, after in pairwise(seen))
    if changes["steps"]:
        assert len(seen) == 7
    if method in SOLVERS and method != "ab2":  # a one-step method ends where its steps lead
        times = made.settings.times(made.flow)
        for before, after, interval in zip(seen, seen[1:], pairwise(times), strict=False):
            torch.testing.assert_close(SOLVERS[method](field, before[1], interval), after[1])


def test_rejected_steps_are_not_seen():
    made, seen, asked = generator(method="dopri5", **STEPLESS), [], []

    def jump(x_t: torch.Tensor, t: float) -> torch.Tensor:
        asked.append(t)
        return torch.full_like(x_t, 50.0 if t > 0.5 else 1.0)

    made.solve(jump, made.noise("sample", [0]), [0], observe=lambda x_t, t: seen.append(t))
    ends = asked[7::6]  # the last two of a step's six stages are at its end
    assert any(after < before for before, after in pairwise(ends))  # there were rejections
    assert all(before < after for before, after in pairwise(seen))
    assert len(asked) > 6 * len(seen)


def test_the_expected_data_are_the_guided_networks_own():
    made = generator(Flow("linear", "data"), method="euler", eps=0.01)
    field, _ = made.field(torch.tensor([1]))
    path = denoising_path(made, [5], [1], frames=5)
    noise = made.noise("sample", [5])
    assert path[0].t == 0.01
    assert (path[0].data == made.pixels(field.predict(noise, 0.01)).numpy()).all()
    assert (path[0].data != path[1].data).any()


def test_an_sdes_path_is_the_same_again_and_not_for_another_seed():
    made = generator(method="euler_maruyama", **NOISY)
    first, again, other = (
        denoising_path(g, [0], [0], frames=7) for g in (made, made, seeded(made, 1))
    )
    assert all((a.x_t == b.x_t).all() and a.t == b.t for a, b in zip(first, again, strict=True))
    assert all((a.x_t != b.x_t).any() for a, b in zip(first, other, strict=True))


def test_more_frames_than_states_are_refused():
    assert len(denoising_path(generator(), [0], [0], frames=5)) == 5
    with pytest.raises(UserError, match="frames 6 must be at most 5.*use more steps"):
        denoising_path(generator(), [0], [0], frames=6)
    with pytest.raises(UserError, match=r"frames 999 must be at most \d+.*smaller tolerances"):
        denoising_path(generator(method="bosh3", **STEPLESS), [0], [0], frames=999)


def test_a_path_keeps_the_states_that_it_shows(monkeypatch):
    made, alive = generator(method="euler", steps=50), []
    solve = Generator.solve

    def counting(self, field, noise, indices, *, observe):
        def watch(x_t, t):
            alive.append(weakref.ref(x_t))
            observe(x_t, t)

        return solve(self, field, noise, indices, observe=watch)

    pixels = Generator.pixels
    kept = []

    def decoding(self, latents):
        kept.append(sum(state() is not None for state in alive))
        return pixels(self, latents)

    monkeypatch.setattr(Generator, "solve", counting)
    monkeypatch.setattr(Generator, "pixels", decoding)
    assert len(denoising_path(made, [0], [0], frames=3)) == 3
    assert len(alive) == 51 and kept[0] == 3


def test_more_images_than_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr("sit_vit5.utils.memory.free_memory", lambda: 10**6)
    names = [str(label) for label in range(1000)]
    with pytest.raises(UserError, match="1,000,000 images takes .* GB .*; ask for fewer classes"):
        sample_grid({"a": generator()}, classes=range(1000), class_names=names, columns=1000)


def shades(count: int, channels: int) -> np.ndarray:
    """`count` images of one colour each, no two the same."""
    values = np.arange(40, 40 + count, dtype=np.uint8)[:, None, None, None]
    return np.broadcast_to(values, (count, 2, 2, channels)).copy()


def order(picture: Image.Image, count: int) -> list[tuple[int, int]]:
    """(row, column) of every shade among the tiles, by the rank of its place."""
    pixels = np.asarray(picture)
    corners = []
    for value in range(40, 40 + count):
        shown = (pixels == value).all(-1)
        rows = np.where(shown.sum(1) >= TILE)[0]  # smoothed letters have single grey pixels
        columns = np.where(shown[rows].sum(0) == TILE)[0]
        assert (len(rows), len(columns)) == (TILE, TILE)
        corners.append((rows[0], columns[0]))
    tops = sorted({top for top, _ in corners})
    lefts = sorted({left for _, left in corners})
    return [(tops.index(top), lefts.index(left)) for top, left in corners]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_strip_shows_times_in_columns_and_two_lines_per_image(channels):
    tiles = shades(12, channels).reshape(3, 2, 2, 2, 2, channels)  # time, (x_t, data), image
    path = [TrajectoryState(t, *pair) for t, pair in zip((0, 0.5, 1), tiles, strict=True)]
    strip = draw_path_strip(path, ["a", "b"], "title")
    expected = [(2 * b + line, t) for t in range(3) for line in (0, 1) for b in (0, 1)]
    assert order(strip, 12) == expected
    assert 3 * TILE < strip.size[0] < 3 * TILE + 160 and 4 * TILE < strip.size[1] < 4 * TILE + 100


def test_an_animations_frame_shows_x_t_left_of_the_data_and_a_row_per_name():
    pair = shades(8, 1).reshape(2, 4, 2, 2, 1)
    (frame,) = draw_path_frames([TrajectoryState(0.5, *pair)], ["a", "b"], "title")
    places = [(0, 0), (0, 2), (1, 0), (1, 2), (0, 1), (0, 3), (1, 1), (1, 3)]
    assert order(frame, 8) == places


@pytest.mark.parametrize("kind", ["gif", "webp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_animation_has_every_frame_loops_and_rests_on_the_last(kind, channels, tmp_path):
    images = shades(5, channels)
    path = [TrajectoryState(t / 4, image[None], image[None]) for t, image in enumerate(images)]
    frames = draw_path_frames(path, ["name"], "title")
    file = tmp_path / f"x.{kind}"
    save_animation(file, frames)
    with Image.open(file) as read:
        assert (read.n_frames, read.info.get("loop")) == (5, 0)
        durations = []
        for number, image in enumerate(images):
            read.seek(number)
            read.load()
            durations.append(read.info["duration"])
            shown = np.asarray(read.convert("RGB")).astype(int)
            at = (shown == int(image[0, 0, 0])).all(-1)
            assert at.sum() >= 2 * TILE * TILE, number
    assert durations[-1] > 5 * durations[0] and len(set(durations[:-1])) == 1


def test_times_have_two_decimals_where_those_say_all():
    assert decimals([0, 0.12, 1]) == ["0.00", "0.12", "1.00"]
    assert decimals([0, 0.125, 0.999]) == ["0.000", "0.125", "0.999"]


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_slerp_turns_evenly_and_its_norm_goes_straight(weight):
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 4, 5, generator=draw) * torch.tensor([1.0, 2]).reshape(
        2, 1, 1, 1
    )
    between = slerp(first, second, weight)
    assert between.shape == first.shape and between.dtype == torch.float32
    expected = (1 - weight) * first.norm() + weight * second.norm()
    torch.testing.assert_close(between.norm(), expected)

    def angle(a: torch.Tensor, b: torch.Tensor) -> float:
        return torch.arccos(
            torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)
        ).item()

    assert angle(first, between) == pytest.approx(weight * angle(first, second), abs=1e-3)
    if weight == 0.5:  # the wrong formula: a straight line is much too short
        straight = torch.lerp(first, second, weight)
        assert straight.norm() < 0.85 * between.norm()


def test_slerp_ends_to_the_bit_and_knows_equal_and_opposite_noises():
    first, second = torch.from_numpy(rng.normal(0, "sample", (1, 4, 6), indices=[0, 1]))
    assert slerp(first, second, 0) is first and slerp(first, second, 1.0) is second
    torch.testing.assert_close(slerp(first, first.clone(), 0.3), first)
    half = slerp(first, -first, 0.5)
    torch.testing.assert_close(half.norm(), first.norm())
    assert abs((half * first).sum()) < 1e-4 * first.norm() ** 2
    torch.testing.assert_close(slerp(first, -first, 1 - 1e-7), -first, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"method": "euler_maruyama", "steps": 6, "sde": SdeConfig()}]
)
def test_an_interpolation_ends_at_the_seeds_own_images(changes):
    """And passes through those between; all noises of an SDE are interpolated."""
    made = generator(**changes)
    images = interpolate(made, [2, 0], seeds=(0, 7, 3), frames=4, batch_size=5)
    assert images.shape == (2, 7, 4, 6, 1)
    for row, label in enumerate((2, 0)):
        for position, seed in ((0, 0), (3, 7), (6, 3)):
            own = seeded(made, seed)([0], [label]).pixels.numpy()[0]
            assert np.abs(images[row, position].astype(int) - own).max() <= 1  # another batch shape
            assert (images[row, position] == own).mean() > 0.95
    flat = images.reshape(14, -1)
    assert len(np.unique(flat, axis=0)) == 14


def test_every_noise_of_an_interpolation_is_the_seeds_own_at_its_ends():
    made = generator()
    between = BetweenSeeds(
        made.model, made.codec, made.flow, made.settings, seeds=(4, 2), frames=3
    )  # fmt: skip
    for purpose, step in (("sample", 0), ("sde", 5)):
        noise = between.noise(purpose, [0, 1, 2, 3], step=step)
        ends = [seeded(made, seed).noise(purpose, [0], step=step)[0] for seed in (4, 2)]
        assert (noise[0] == ends[0]).all() and (noise[2] == ends[1]).all()
        assert (noise[3] == ends[0]).all()  # the next row
        torch.testing.assert_close(noise[1], slerp(*ends, 0.5))


def test_equal_seeds_stand_still():
    images = interpolate(generator(), [1], seeds=(5, 5), frames=3, batch_size=8)[0]
    assert np.abs(images.astype(int) - images[0]).max() <= 1


def test_the_way_to_another_class_ends_at_its_image():
    worse = tiny_denoiser(seed=1)
    for made in (generator(), replace(generator(), reference=worse)):
        images = interpolate(made, [0, 1], to_label=2, seeds=(0, 0), frames=5, batch_size=64)
        for row, label in enumerate((0, 1)):
            for position, own_label in ((0, label), (4, 2)):
                own = made([0], [own_label]).pixels.numpy()[0]
                assert np.abs(images[row, position].astype(int) - own).max() <= 1
        assert len(np.unique(images[0].reshape(5, -1), axis=0)) == 5


def test_classes_between_two_are_a_straight_line_and_share_the_network():
    model = tiny_denoiser()
    mixed = between_classes(model, [(0, 2), (1, 2)], 3)
    table, rows = model.conditioning.labels.weight, mixed.conditioning.labels.weight
    assert (rows[[0, 2, 3, 5, 6]] == table[[0, 2, 1, 2, 3]]).all()
    torch.testing.assert_close(rows[1], (table[0] + table[2]) / 2)
    assert (mixed.num_classes, mixed.null_label, model.num_classes) == (6, 6, 3)
    others = [name for name, p in mixed.named_parameters() if name != "conditioning.labels.weight"]
    assert others and all(mixed.get_parameter(name) is model.get_parameter(name) for name in others)


def test_an_interpolations_columns_are_its_positions():
    assert position_names([3, 5, 3], 3) == ["seed 3", "0.50", "seed 5", "0.50", "seed 3"]
    assert position_names([0, 1], 2) == ["seed 0", "seed 1"]
    assert position_names([0, 1], 5)[1:4] == ["0.25", "0.50", "0.75"]
    images = shades(6, 3).reshape(2, 3, 2, 2, 3)
    strip = draw_interpolation_strip(images, ["a", "b"], ["seed 0", "0.50", "seed 1"], "title")
    assert order(strip, 6) == [(row, column) for row in (0, 1) for column in (0, 1, 2)]
    frames = draw_interpolation_frames(images, ["a", "b"], ["seed 0", "0.50", "seed 1"], "title")
    assert len(frames) == 3
    pixels = np.asarray(frames[1])
    assert [(pixels == 40 + n).all(-1).sum() >= TILE**2 for n in range(6)] == [
        False, True, False, False, True, False,
    ]  # fmt: skip
