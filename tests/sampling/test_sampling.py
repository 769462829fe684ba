"""Solvers against closed forms; guidance, labels, grids; images as functions of their index."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sit_vit5 import presets
from sit_vit5.codecs import build_codec, to_uint8
from sit_vit5.errors import UserError
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.presets import Backbone
from sit_vit5.sampling.generator import (
    Settings,
    choose_labels,
    find_classes,
    sample_images,
)
from sit_vit5.sampling.grid import GAP, TILE, draw_grid, sample_grid
from sit_vit5.sampling.guidance import VelocityField, guidance_scale_or_default
from sit_vit5.sampling.ode import SAMPLERS, uniform_grid


def network(num_classes: int = 3) -> Denoiser:
    torch.manual_seed(0)
    backbone = Backbone(16, 1, 2, patch_size=2, recipe=presets.RECIPES["ViT5"])
    model = Denoiser(backbone, in_channels=1, input_size=(4, 6), num_classes=num_classes)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.eval().requires_grad_(False)


def settings(**changes) -> Settings:
    return Settings(
        **{
            "method": "heun",
            "steps": 4,
            "guidance_scale": 1.0,
            "precision": "fp32",
            "attention": "fused",
            "seed": 0,
            **changes,
        }
    )


ORDERS = {"euler": 1, "heun": 2}


@pytest.mark.parametrize("method", SAMPLERS)
def test_solver_converges_with_its_order(method):
    # dx/dt = x cos(t) has x(1) = x(0) exp(sin 1).
    exact = math.exp(math.sin(1))

    def error(steps: int) -> float:
        x = torch.ones(1, dtype=torch.float64)
        end = SAMPLERS[method](lambda x, t: x * math.cos(t), x, uniform_grid(steps))
        return abs(end.item() - exact)

    assert math.log2(error(40) / error(80)) == pytest.approx(ORDERS[method], abs=0.1)


@pytest.mark.parametrize(("method", "evaluations"), [("euler", 5), ("heun", 10)])
def test_evaluations_and_passes_are_counted(method, evaluations):
    model = network()
    for scale, passes in ((1.0, 1), (2.0, 2), (0.0, 2)):
        images = sample_images(
            model,
            build_codec("identity"),
            indices=[0, 1],
            labels=[0, 1],
            settings=settings(method=method, steps=5, guidance_scale=scale),
        )
        assert (images.evaluations, images.passes) == (evaluations, passes * evaluations)


def test_uniform_grid_has_steps_intervals_from_noise_to_data():
    assert uniform_grid(4) == [0, 0.25, 0.5, 0.75, 1]


def test_guidance_extrapolates_from_the_null_to_the_class():
    model = network()
    x, labels = torch.randn(3, 1, 4, 6), torch.tensor([0, 1, 2])
    t = torch.full((3,), 0.3)
    v_class = model(x, t, labels)
    v_null = model(x, t, torch.full((3,), model.null_label))
    for scale in (0.0, 1.0, 2.5):
        field = VelocityField(model, labels, guidance_scale=scale)
        expected = v_null + scale * (v_class - v_null)
        torch.testing.assert_close(field(x, 0.3), expected, rtol=1e-4, atol=1e-5)


def test_guidance_needs_a_null_label_that_training_has_shown():
    guidable = {"class_names": ("a",), "class_dropout": 0.1}
    assert guidance_scale_or_default(None, **guidable) == 2
    assert guidance_scale_or_default(3.5, **guidable) == 3.5
    for model, reason in (
        ({"class_names": (), "class_dropout": 0.1}, "has no classes"),
        ({"class_names": ("a",), "class_dropout": 0.0}, "class_dropout 0"),
    ):
        assert guidance_scale_or_default(None, **model) == 1
        assert guidance_scale_or_default(1, **model) == 1
        with pytest.raises(UserError, match=reason):
            guidance_scale_or_default(2, **model)


def test_state_stays_fp32_in_bf16_and_many_steps_stay_close(monkeypatch):
    model, noise = network(), torch.randn(2, 1, 4, 6)
    labels = torch.tensor([0, 1])
    ends = {}
    for precision in ("fp32", "bf16"):
        field = VelocityField(model, labels, guidance_scale=1.0, precision=precision)
        ends[precision] = SAMPLERS["euler"](field, noise, uniform_grid(250))
    assert ends["bf16"].dtype == torch.float32
    spread = ends["fp32"].std()
    assert 0 < (ends["bf16"] - ends["fp32"]).abs().max() < 0.05 * spread


def test_an_image_depends_on_its_index_and_not_on_its_batch():
    model, codec = network(), build_codec("identity")

    def images(indices: list[int]) -> np.ndarray:
        labels = [index % 3 for index in indices]
        chosen = settings(guidance_scale=1.5)
        return sample_images(
            model, codec, indices=indices, labels=labels, settings=chosen
        ).pixels.numpy()

    together = images([0, 1, 2, 3, 4, 5, 6, 7])
    assert together.shape == (8, 4, 6, 1) and together.dtype == np.uint8
    for index in (0, 3, 7):
        alone = images([index])[0].astype(int)
        assert np.abs(alone - together[index]).max() <= 1  # rounding of another batch shape
    assert len(np.unique(together.reshape(8, -1), axis=0)) == 8
    assert (images([0, 1]) == together[:2]).mean() > 0.99


def test_seed_label_steps_method_and_guidance_change_the_image():
    model, codec = network(), build_codec("identity")

    def image(label=0, **changes) -> torch.Tensor:
        return sample_images(
            model, codec, indices=[0], labels=[label], settings=settings(**changes)
        ).pixels

    base = image()
    assert (image() == base).all()
    for other in (
        image(seed=1), image(label=1), image(steps=1), image(method="euler", steps=2),
        image(guidance_scale=3.0), image(precision="bf16", steps=50),
    ):  # fmt: skip
        assert (other != base).any()


def test_non_finite_images_are_never_returned():
    model = network()
    model.final.bias.data.fill_(float("nan"))
    with pytest.raises(UserError, match="non-finite images; none was written"):
        sample_images(model, build_codec("identity"), indices=[0], labels=[0], settings=settings())


def test_labels_outside_the_range_and_unknown_methods_are_refused():
    with pytest.raises(UserError, match=r"label 3 is not in 0..2"):
        sample_images(
            network(), build_codec("identity"), indices=[0], labels=[3], settings=settings()
        )
    with pytest.raises(UserError, match="unknown sampling method 'huen'; nearest: heun"):
        settings(method="huen")


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
    for wrong in ("bird", "3", "-1"):
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
    models = {"raw": network()}
    picture = sample_grid(
        models, build_codec("identity"), classes=[2, 0], class_names=("a", "b", "c"), columns=3,
        settings=settings(), batch_size=4,
    )  # fmt: skip
    unconditional = sample_grid(
        {"raw": network(0)}, build_codec("identity"), classes=[], class_names=(), columns=3,
        settings=settings(),
    )  # fmt: skip
    assert picture.size[1] < unconditional.size[1]  # two rows against four
    with pytest.raises(UserError, match="label 5"):
        sample_grid(
            models, build_codec("identity"), classes=[5], class_names=("a",) * 6, columns=1,
            settings=settings(),
        )  # fmt: skip
