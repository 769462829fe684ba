"""Images as functions of their index; labels, grids, settings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers import tiny_denoiser

from sit_vit5.codecs import build_codec, to_uint8
from sit_vit5.config import SdeConfig
from sit_vit5.flow.predictions import Flow
from sit_vit5.sampling.field import Guidance
from sit_vit5.sampling.generator import Generator, Settings, choose_labels, find_classes
from sit_vit5.sampling.grid import GAP, TILE, draw_grid, sample_grid
from sit_vit5.sampling.ode import STAGES
from sit_vit5.sampling.sde import SDE_STAGES
from sit_vit5.utils.errors import UserError


def generator(num_classes: int = 3, reference=None, flow: Flow | None = None, **changes):
    settings = Settings(**{"method": "heun", "steps": 4} | changes)
    model, codec = tiny_denoiser(num_classes), build_codec("identity")
    return Generator(model, codec, flow or Flow("linear", "velocity"), settings, reference)


@pytest.mark.parametrize(
    ("changes", "evaluations"),
    [
        ({"method": "euler", "steps": 5}, 5),
        ({"method": "midpoint", "steps": 5}, 10),
        ({"method": "heun", "steps": 5}, 10),
        ({"method": "heun3", "steps": 5}, 15),
        ({"method": "rk4", "steps": 5}, 20),
        ({"method": "ab2", "steps": 5}, 5),
        ({"method": "euler_maruyama", "steps": 5, "sde": SdeConfig()}, 5),
        ({"method": "euler_maruyama", "steps": 5, "sde": SdeConfig(last_step="none")}, 5),
        ({"method": "stochastic_heun", "steps": 5, "sde": SdeConfig(last_step="tweedie")}, 9),
    ],
)
def test_evaluations_and_passes_are_counted(changes, evaluations):
    """An SDE's last step is one of its steps; SiT's code takes two evaluations for each of ours."""
    for scale, passes in ((1.0, 1), (2.0, 2), (0.0, 2)):
        images = generator(guidance=Guidance(scale), **changes)([0, 1], [0, 1])
        assert (images.evaluations, images.passes) == (evaluations, passes * evaluations)


def test_an_adaptive_method_counts_what_it_took_and_stays_inside():
    made = generator(method="dopri5", steps=None, atol=1e-5, rtol=1e-3)
    asked = []
    made.model.register_forward_pre_hook(lambda module, inputs: asked.append(float(inputs[1][0])))
    images = made([0, 1], [0, 1])
    assert images.evaluations == images.passes == len(asked) > 7
    assert min(asked) == 0 and 0.999 < max(asked) <= 1
    strict = generator(method="dopri5", steps=None, atol=1e-7, rtol=1e-6)([0, 1], [0, 1])
    assert strict.evaluations > images.evaluations


def test_outside_the_interval_the_reference_is_not_asked():
    guidance = Guidance(3.0, interval=(0.25, 0.5))
    images = generator(method="euler", steps=8, guidance=guidance)([0], [0])
    assert (images.evaluations, images.passes) == (8, 8 + 3)  # t = 0.25, 0.375, 0.5


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun", "heun3", "rk4", "ab2"])
def test_a_guided_step_is_guided_in_all_its_stages_and_no_other_is(method):
    stages = STAGES[method]
    for first, last in ((3, 3), (0, 9), (7, 9)):
        guidance = Guidance(3.0, steps=(first, last))
        images = generator(method=method, steps=10, guidance=guidance)([0], [0])
        assert images.passes - images.evaluations == stages * (last - first + 1)
    always = generator(method=method, steps=10, guidance=Guidance(3.0))([0], [0])
    every = generator(method=method, steps=10, guidance=Guidance(3.0, steps=(0, 9)))([0], [0])
    assert (always.pixels == every.pixels).all()


def test_an_sdes_last_step_is_one_of_its_guided_steps():
    for method, stages in SDE_STAGES.items():
        guidance = Guidance(3.0, steps=(9, 9))
        made = generator(method=method, steps=10, sde=SdeConfig(), guidance=guidance)
        images = made([0], [0])
        assert images.evaluations == 9 * stages + 1 and images.passes == images.evaluations + 1


def test_ends_that_cross_and_tolerances_out_of_reach_are_refused():
    with pytest.raises(UserError, match="would run from t 0.45 to 0.4; use a smaller eps or"):
        generator(
            flow=Flow("linear", "noise"), method="euler_maruyama", steps=5, eps=0.45,
            sde=SdeConfig(last_step_size=0.6),
        )([0], [0])  # fmt: skip
    with pytest.raises(UserError, match="dopri5 cannot reach atol 1e-30"):
        generator(method="dopri5", steps=None, atol=1e-30, rtol=1e-30)([0], [0])


def test_autoguidance_asks_the_worse_network_and_changes_the_image():
    worse = tiny_denoiser(3, seed=1)
    plain, pushed = (
        generator(method="euler", guidance=Guidance(scale), reference=worse)([0], [0])
        for scale in (1.0, 2.0)
    )
    assert (plain.passes, pushed.passes) == (4, 8)
    assert (plain.pixels != pushed.pixels).any()
    own = generator(method="euler", guidance=Guidance(2.0))([0], [0])
    assert (own.pixels != pushed.pixels).any()


def test_state_stays_fp32_in_bf16_and_many_steps_stay_close():
    ends = {}
    for precision in ("fp32", "bf16"):
        made = generator(method="euler", steps=250, precision=precision)
        field, _ = made.field(torch.tensor([0, 1]))
        ends[precision] = made.solve(field, made.noise("sample", [0, 1]), [0, 1])
    assert ends["bf16"].dtype == torch.float32
    spread = ends["fp32"].std()
    assert 0 < (ends["bf16"] - ends["fp32"]).abs().max() < 0.05 * spread


@pytest.mark.parametrize("changes", [{}, {"method": "euler_maruyama", "sde": SdeConfig()}])
def test_an_image_depends_on_its_index_and_not_on_its_batch(changes):
    made = generator(guidance=Guidance(1.5), **changes)

    def images(indices: list[int]) -> np.ndarray:
        return made(indices, [index % 3 for index in indices]).pixels.numpy()

    together = images([0, 1, 2, 3, 4, 5, 6, 7])
    assert together.shape == (8, 4, 6, 1) and together.dtype == np.uint8
    for index in (0, 3, 7):
        alone = images([index])[0].astype(int)
        assert np.abs(alone - together[index]).max() <= 1  # rounding of another batch shape
    assert len(np.unique(together.reshape(8, -1), axis=0)) == 8
    assert (images([0, 1]) == together[:2]).mean() > 0.99


def test_every_setting_changes_the_image():
    sde, noisy = SdeConfig(), {"method": "euler_maruyama", "steps": 20}
    base = {"method": "heun", "steps": 4}
    groups = [
        [
            base, base | {"seed": 1}, base | {"steps": 1}, {"method": "euler", "steps": 2},
            {"method": "midpoint", "steps": 2}, {"method": "ab2", "steps": 3},
            base | {"guidance": Guidance(3.0)}, base | {"shift": 3.0},
            base | {"guidance": Guidance(3.0, interval=(0.3, 0.7))},
            base | {"guidance": Guidance(3.0, schedule="cosine")},
            {"method": "dopri5", "steps": None, "atol": 0.1, "rtol": 0.1},
            noisy | {"sde": sde}, noisy | {"sde": sde, "seed": 2},
            noisy | {"sde": replace(sde, norm=0.5)},
            noisy | {"sde": replace(sde, last_step="tweedie")},
            noisy | {"sde": replace(sde, last_step="none")},
            noisy | {"sde": replace(sde, last_step_size=0.1)},
            noisy | {"sde": replace(sde, diffusion="constant")},
            {"method": "stochastic_heun", "steps": 20, "sde": sde},
        ],
    ]  # fmt: skip
    for group in groups:
        images = [generator(**changes)([0], [0]).pixels.numpy().tobytes() for changes in group]
        assert len(set(images)) == len(group)
    assert (generator()([0], [1]).pixels != generator()([0], [0]).pixels).any()
    assert (generator()([0], [0]).pixels == generator()([0], [0]).pixels).all()


SDES = [
    SdeConfig(diffusion=diffusion, last_step=last_step)
    for diffusion in ("sbdm", "sigma", "constant")
    for last_step in ("none", "mean", "euler", "tweedie")
]
SOLVED = [("heun", None), *product(("euler_maruyama", "stochastic_heun"), SDES)]


@pytest.mark.parametrize("interpolant", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("prediction", ["velocity", "score", "noise", "data"])
def test_no_choice_divides_by_zero(interpolant, prediction):
    for method, sde in SOLVED:
        made = generator(flow=Flow(interpolant, prediction), method=method, steps=8, sde=sde)
        field, _ = made.field(torch.tensor([0]))
        end = made.solve(field, made.noise("sample", [0]), [0])
        assert end.isfinite().all(), (method, sde)


def test_non_finite_images_are_never_returned():
    made = generator()
    made.model.final.bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="non-finite images; none was written"):
        made([0], [0])


def test_labels_outside_the_range_and_a_lone_last_step_are_refused():
    with pytest.raises(UserError, match=r"label 3 is not in 0..2"):
        generator()([0], [3])
    with pytest.raises(UserError, match="steps 1 leaves none before the sde's last step"):
        generator(method="euler_maruyama", steps=1, sde=SdeConfig())([0], [0])


def test_to_uint8_is_the_formula_of_dit_and_undoes_the_loader():
    x = torch.tensor([-2.0, -1.0, -0.001, 0.0, 0.5, 1.0, 3.0]).reshape(1, 1, 1, 7)
    assert to_uint8(x).flatten().tolist() == [0, 0, 127, 128, 191, 255, 255]
    every = torch.arange(256).reshape(1, 1, 16, 16)
    assert (to_uint8(every / 127.5 - 1).flatten() == every.flatten()).all()
    assert to_uint8(torch.zeros(2, 3, 4, 5)).shape == (2, 4, 5, 3)


def test_random_labels_depend_on_the_index_alone_and_cover_the_classes():
    chosen = choose_labels(range(300), classes=[2, 5, 7], mode="random", seed=0)
    assert choose_labels([250, 3], classes=[2, 5, 7], mode="random", seed=0) == [
        chosen[250], chosen[3],
    ]  # fmt: skip
    counts = [chosen.count(label) for label in (2, 5, 7)]
    assert sum(counts) == 300 and min(counts) > 70 and len(set(counts)) > 1
    assert choose_labels(range(300), classes=[2, 5, 7], mode="random", seed=1) != chosen


def test_balanced_labels_cycle_and_unconditional_labels_are_zero():
    assert choose_labels(range(5), classes=[4, 9], mode="balanced", seed=0) == [4, 9, 4, 9, 4]
    assert choose_labels(range(3), classes=[], mode="random", seed=0) == [0, 0, 0]


def test_classes_are_found_by_name_first_and_by_number():
    names = ("cat", "1", "dog")
    assert find_classes(["dog", "1", "0"], names) == [2, 1, 0]
    assert find_classes([], names) == [0, 1, 2]
    assert find_classes(["7"], ("5", "7", "0")) == [1]
    with pytest.raises(UserError, match="class '1' is no class name; classes: 5, 7, 0"):
        find_classes(["1"], ("5", "7", "0"))  # all names are numbers: a number is a name
    with pytest.raises(UserError, match="unconditional"):
        find_classes(["1"], ())
    for wrong in ("bird", "3", "-1", "9" * 5000, "\u00b2"):
        with pytest.raises(UserError, match="is no class name or number; classes: cat, 1, dog"):
            find_classes([wrong], names)


def test_grid_shows_every_image_where_row_and_column_say():
    images = np.zeros((6, 2, 2, 3), np.uint8)
    images[..., 0] = 255
    images[..., 1] = np.arange(6)[:, None, None]  # red shades: no text has these colours
    blocks = {"raw": images, "EMA": images[::-1]}
    picture = np.asarray(draw_grid(blocks, ["a", "bb"], columns=3)).astype(int)

    def corners(index: int) -> list[tuple[int, int]]:
        shown = (picture == (255, index, 0)).all(-1)
        assert shown.sum() == 2 * TILE * TILE  # once in each block, enlarged without blurring
        found = []
        for half in (slice(0, middle), slice(middle, None)):
            ys, xs = np.where(shown[:, half])
            assert (np.ptp(ys), np.ptp(xs)) == (TILE - 1, TILE - 1)
            found.append((ys.min(), xs.min() + (half.start or 0)))
        return found

    upper = picture[: picture.shape[0] // 2]
    middle = np.where((upper == (255, 5, 0)).all(-1))[1].min()  # image 5 opens the second block
    (top, left), _ = corners(0)
    for index in range(6):
        row, column = divmod(index, 3)
        step = TILE + GAP
        first, second = corners(index)
        assert first == (top + row * step, left + column * step)
        row, column = divmod(5 - index, 3)
        assert second == (top + row * step, middle + column * step)


def test_grid_rows_are_the_asked_classes_and_columns_change_the_noise():
    made = {"raw": generator()}
    picture = sample_grid(
        made, classes=[2, 0], class_names=("a", "b", "c"), columns=3, batch_size=4
    )
    unconditional = sample_grid({"raw": generator(0)}, classes=[], class_names=(), columns=3)
    assert picture.size[1] < unconditional.size[1]  # two rows against four
    with pytest.raises(UserError, match="label 5"):
        sample_grid(made, classes=[5], class_names=("a",) * 6, columns=1)
