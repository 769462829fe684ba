"""Parameters and FLOPs against the official models' numbers, and the command that lists them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, command_environment
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sit_vit5.analysis.cost import classifier_cost, denoiser_cost
from sit_vit5.commands.models import CLASSIFIERS, ListConfig, matching
from sit_vit5.config import presets
from sit_vit5.config.parse import parse
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.errors import UserError

GOLDEN = json.loads((ROOT / "tests" / "golden" / "param_counts.json").read_text())
OFFICIAL_CLASSIFIERS = dict(
    zip(("vit5_small", "vit5_base", "vit5_large", "vit5_xlarge"), CLASSIFIERS, strict=True)
)


@pytest.mark.parametrize("case", GOLDEN["sit_dit"])
def test_denoiser_cost_is_the_official_models(case):
    name, sigma = case.split(" learn_sigma=")
    cost = denoiser_cost(
        presets.backbone(name),
        in_channels=4,
        input_size=(32, 32),
        num_classes=1000,
        out_channels=8 if sigma == "True" else 4,
    )
    assert cost.parameters == GOLDEN["sit_dit"][case]["total"]
    assert cost.flops / 2e9 == pytest.approx(GOLDEN["sit_dit"][case]["gmacs_batch1"], abs=6e-5)


def test_flops_are_twice_the_gflops_of_the_dit_paper():
    # Peebles and Xie (2023), table 4: DiT-XL/2 has 118.6 "Gflops", which are multiply-adds.
    shape = dict(in_channels=4, input_size=(32, 32), num_classes=1000, out_channels=8)
    assert denoiser_cost(presets.backbone("DiT-XL/2"), **shape).flops == pytest.approx(
        2 * 118.6e9, rel=0.001
    )


@pytest.mark.parametrize("official", OFFICIAL_CLASSIFIERS)
def test_classifier_cost_is_the_official_models(official):
    facts = GOLDEN["classifiers"][official]
    cost = classifier_cost(presets.backbone(OFFICIAL_CLASSIFIERS[official]))
    assert (cost.parameters, cost.flops) == (facts["params"]["total"], facts["flops"])


def counted(model: torch.nn.Module, *inputs: torch.Tensor) -> tuple[int, int]:
    """Parameters and FLOPs of a whole model on real tensors."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*inputs)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops()


@pytest.mark.filterwarnings("ignore:LayerScale with a gated MLP")
@pytest.mark.parametrize("recipe", presets.RECIPES)
def test_counting_one_block_gives_what_the_whole_model_gives(recipe):
    backbone = presets.backbone(f"{recipe}-Nano/2")
    shape = dict(in_channels=3, input_size=(8, 12), num_classes=10)
    cost = denoiser_cost(backbone, **shape)
    label = torch.zeros(1, dtype=torch.long)
    inputs = torch.zeros(1, 3, 8, 12), torch.zeros(1), label
    assert (cost.parameters, cost.flops) == counted(Denoiser(backbone, **shape), *inputs)
    cost = classifier_cost(backbone, image_size=(8, 12), num_classes=10)
    whole = ViT5Classifier(backbone, image_size=(8, 12), num_classes=10)
    assert (cost.parameters, cost.flops) == counted(whole, torch.zeros(1, 3, 8, 12))


def test_gamma_in_the_gates_place_saves_two_vectors_of_six():
    shape = dict(in_channels=4, input_size=(32, 32), num_classes=1000)
    product = presets.backbone("ViT5-XL/2")
    instead = replace(product, recipe=replace(product.recipe, layer_scale="instead"))
    costs = [denoiser_cost(backbone, **shape) for backbone in (product, instead)]
    saved = 28 * 2 * 1152
    assert costs[0].parameters - costs[1].parameters == saved * (1152 + 1)
    assert costs[0].flops - costs[1].flops == 2 * saved * 1152
    nano = replace(presets.backbone("ViT5-Nano/2"), recipe=instead.recipe)
    cost = denoiser_cost(nano, **shape)
    label = torch.zeros(1, dtype=torch.long)
    inputs = torch.zeros(1, 4, 32, 32), torch.zeros(1), label
    assert (cost.parameters, cost.flops) == counted(Denoiser(nano, **shape), *inputs)


def test_patterns_name_models_once_and_in_order():
    assert matching(("SiT-XL", "SiT-[XL]*/2", "ViT5-S/8")) == [
        "ViT5-S/8", "SiT-L/2", "SiT-XL/2"
    ]  # fmt: skip
    assert len(matching(("*",))) == len(presets.RECIPES) * len(presets.SIZES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ViT5-XXL"], "no model matches 'ViT5-XXL/2'; nearest: ViT5-XL/2"),
        (["ViT5-S", "x*"], "no model matches 'x[*]/2'"),
        (["--image-size", "0"], "image_size 0 must be at least 1"),
        (["--num-classes", "-1"], "num_classes -1 must be at least 0"),
        (["--image-size", "100"], "not divisible by latent_factor 8; use 96 or 104"),
        (["--latent-chanels", "4"], "nearest: latent_channels"),
    ],
)
def test_a_wrong_listing_is_refused(argv, message):
    with pytest.raises(UserError, match=message):
        matching(parse(ListConfig, argv).names)


def listing(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    shown = subprocess.run(
        [sys.executable, "-m", "sit_vit5", "models", *arguments],
        cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert shown.returncode == code, shown.stderr
    return shown


def test_the_listing_shows_every_recipe_and_the_released_classifiers():
    shown = listing()
    assert not shown.stderr
    assert all(f"\n{recipe}-XL/2 " in shown.stdout for recipe in presets.RECIPES)
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["SiT-XL/2", "675,111,184", "237.23"] in lines
    assert ["ViT5-B/16", "86,543,080", "35.87"] in lines
    assert "2 x multiply-adds" in shown.stdout


def test_the_listing_of_pixels_in_json():
    options = ("--image-size", "8", "--latent-factor", "1", "--latent-channels", "1")
    shown = listing("ViT5-Nano", *options, "--num-classes", "10", "--json", "True")
    (row,) = json.loads(shown.stdout)
    cost = denoiser_cost(
        presets.backbone("ViT5-Nano/2"), in_channels=1, input_size=(8, 8), num_classes=10
    )
    assert row == {
        "model": "ViT5-Nano/2", "kind": "denoiser",
        "parameters": cost.parameters, "flops": cost.flops,
    }  # fmt: skip


def test_a_typo_in_the_listing_gets_one_line_and_status_two():
    (line,) = listing("ViT5-S/3", code=2).stderr.splitlines()
    assert line.startswith("error: no model matches 'ViT5-S/3'; nearest: ViT5-S/")
