"""The tables of published values: whole, plausible, and those of the pages that show them."""

from __future__ import annotations

import pytest

from sit_vit5.config.presets import backbone
from sit_vit5.report.published import Expected, paper_name, published, rival


def test_every_curve_is_of_a_model_of_ours_and_falls():
    curves = published().curves
    assert len(curves) == 8
    for model, curve in curves.items():
        backbone(model)
        values = [curve[step] for step in sorted(curve)]
        assert values == sorted(values, reverse=True) and min(curve) == 200_000, model


def test_vit5_is_ahead_of_sit_at_every_published_step():
    curves = published().curves
    for model in ("ViT5-S/2", "ViT5-B/2", "ViT5-L/2", "ViT5-XL/2"):
        other = curves[rival(model)]
        assert all(curves[model][step] < fid for step, fid in other.items())


def test_a_rival_is_the_other_backbone_of_the_same_size():
    assert rival("ViT5-B/2") == "SiT-B/2" and rival("SiT-XL/2") == "ViT5-XL/2"
    assert rival("ViT5-B/4") is None
    assert paper_name("ViT5-XL/2") == "ViT-5-XL/2" and paper_name("SiT-S/2") == "SiT-S/2"


@pytest.mark.parametrize(
    ("value", "met"), [(2.06, True), (2.16, True), (1.96, True), (2.161, False), (1.95, False)]
)
def test_a_value_is_met_within_its_tolerance(value, met):
    assert Expected(2.06, 0.1).met_by(value) is met
    assert published().sampler == Expected(2.06, 0.1)


def test_adms_values_are_those_of_its_readme():
    values = {name: entry.value for name, entry in published().evaluator.items()}
    assert values == {
        "frechet_distance": 3.94256, "spatial_frechet_distance": 6.14043,
        "inception_score": 215.837, "precision": 0.8265, "recall": 0.5309,
    }  # fmt: skip
