"""The denoiser: shapes, conditioning, recipes, precision."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace

import pytest
import torch

from sit_vit5.config import presets
from sit_vit5.config.presets import Backbone
from sit_vit5.config.recipes import Recipe
from sit_vit5.models.denoiser import Denoiser, check_labels
from sit_vit5.utils.errors import UserError


def tiny(
    recipe: str | Recipe = "ViT5",
    *,
    num_classes=3,
    in_channels=2,
    size=(8, 8),
    heads=None,
    **changes,
):
    recipe = presets.RECIPES[recipe] if isinstance(recipe, str) else recipe
    backbone = Backbone(width=32, depth=2, heads=2, patch_size=2, recipe=recipe)
    torch.manual_seed(0)
    return Denoiser(
        replace(backbone, **changes),
        in_channels=in_channels,
        input_size=size,
        num_classes=num_classes,
        heads=heads,
    )


def randomise(model: Denoiser, seed: int = 1) -> Denoiser:
    """Zero-initialised parts would hide what the input changes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def inputs(model: Denoiser, batch=3, size=(8, 8)):
    generator = torch.Generator().manual_seed(2)
    x_t = torch.randn(batch, model.in_channels, *size, generator=generator)
    labels = torch.arange(batch) % (model.num_classes or 1)
    return x_t, torch.linspace(0.1, 0.9, batch), labels


# SiT-XL/2: official count, fixed table included. ViT5-XL/2: the same without qkv biases and with a
# learned table (same size), plus registers, QK-norm weights and two gammas per block.
SIT_XL = 675_111_184
VIT5_XL = SIT_XL + 4 * 1152 + 28 * (-3 * 1152 + 2 * 72 + 2 * 1152)


@pytest.mark.parametrize(("name", "count"), [("SiT-XL/2", SIT_XL), ("ViT5-XL/2", VIT5_XL)])
def test_parameter_counts_of_the_largest_models(name, count):
    with torch.device("meta"):
        model = Denoiser(
            presets.backbone(name), in_channels=4, input_size=(32, 32), num_classes=1000
        )
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.is_meta for p in model.parameters())


def test_a_gated_mlp_under_layer_scale_warns_once_and_has_as_many_weights():
    from sit_vit5.models.block import warn_over_gating

    warn_over_gating.cache_clear()
    with pytest.warns(UserWarning, match="over-gates: ViT-5"):
        gated = tiny("ViT5-swiglu", width=96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny("ViT5-swiglu")
        tiny("ViT5-swiglu_no_layer_scale")
    plain = tiny("ViT5", width=96)
    weights = [sum(p.numel() for p in model.parameters()) for model in (gated, plain)]
    assert weights[0] == pytest.approx(weights[1], rel=0.01)


@pytest.mark.parametrize("recipe", presets.RECIPES)
@pytest.mark.parametrize("patch", [1, 2, 4, 8])
def test_every_recipe_and_patch_returns_the_input_shape(recipe, patch):
    model = randomise(tiny(recipe, patch_size=patch, size=(16, 8)))
    x_t, t, labels = inputs(model, size=(16, 8))
    prediction = model(x_t, t, labels)
    assert prediction.shape == x_t.shape and prediction.dtype == torch.float32
    assert prediction.isfinite().all() and prediction.std() > 0


@pytest.mark.parametrize("recipe", presets.RECIPES)
def test_another_size_than_the_constructed_one_runs(recipe):
    model = randomise(tiny(recipe))
    x_t, t, labels = inputs(model, size=(12, 6))
    assert model(x_t, t, labels).shape == x_t.shape


@pytest.mark.parametrize("size", [(9, 8), (8, 7), (1, 8)])
def test_a_size_not_divisible_by_the_patch_is_refused_with_legal_sides(size):
    model = tiny()
    with pytest.raises(UserError, match=r"not divisible by patch 2; use \d"):
        model(torch.zeros(1, 2, *size), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(UserError, match="not divisible by patch 2"):
        tiny(size=size)


def test_a_fresh_network_predicts_zero():
    model = tiny()
    assert model(*inputs(model)).abs().max() == 0


@pytest.mark.parametrize("recipe", presets.RECIPES)
def test_time_label_and_input_each_change_the_prediction(recipe):
    model = randomise(tiny(recipe))
    x_t, t, labels = inputs(model)
    base = model(x_t, t, labels)
    for other in (model(x_t + 0.1, t, labels), model(x_t, t + 0.05, labels)):
        assert (other - base).abs().amax((1, 2, 3)).min() > 1e-3
    relabelled = model(x_t, t, (labels + 1) % 4)
    assert (relabelled - base).abs().amax((1, 2, 3)).min() > 1e-3


def test_an_unconditional_model_has_no_labels():
    model = randomise(tiny(num_classes=0))
    assert model.null_label is None
    assert not any("labels" in name for name in model.state_dict())
    x_t, t, labels = inputs(model)
    assert (model(x_t, t) == model(x_t, t, labels)).all()


def test_samples_of_a_batch_do_not_see_one_another():
    model = randomise(tiny())
    x_t, t, labels = inputs(model)
    alone = torch.cat([model(x_t[i : i + 1], t[i : i + 1], labels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(x_t, t, labels), alone, rtol=1e-5, atol=1e-5)


CHANGES = {
    "norm": "layer",
    "mlp": "swiglu",
    "layer_scale": "none",
    "layer_scale_init": 0.3,
    "qk_norm": False,
    "qkv_bias": True,
    "position": "none",
    "rope_theta": 100.0,
    "registers": 9,
    "register_theta": None,
    "post_norm": True,
    "mlp_bias": False,
    "key_bias": False,
    "proj_bias": False,
    "attention_sink": True,
    "rope_extent": 12.0,
}


@pytest.mark.parametrize("field", [field.name for field in fields(Recipe)])
def test_every_recipe_field_changes_the_prediction(field):
    def prediction(recipe: Recipe) -> torch.Tensor:
        model = tiny(recipe)
        # The same numbers in both models, by name.
        for name, parameter in model.named_parameters():
            if "gamma" not in name or field != "layer_scale_init":
                generator = torch.Generator().manual_seed(len(name))
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        return model(*inputs(model))

    recipe = replace(presets.RECIPES["ViT5"], qkv_bias=field == "key_bias")
    changed = prediction(replace(recipe, **{field: CHANGES[field]}))
    assert (changed - prediction(recipe)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("meets", "expected"),
    [("none", 0.5), ("product", 0.25 * 0.5), ("instead", 0.25)],
)
def test_layer_scale_meets_the_gate_as_named(meets, expected):
    from sit_vit5.models.block import Gate

    recipe = replace(presets.RECIPES["ViT5"], layer_scale=meets, layer_scale_init=0.25)
    gate = Gate(4, recipe)
    modulated = None if recipe.modulation_vectors == 4 else torch.full((1, 1, 4), 0.5)
    assert torch.allclose(gate(modulated), torch.tensor(expected))
    assert [p.shape for p in gate.parameters()] == ([] if meets == "none" else [(4,)])


def test_rotary_table_is_built_once_per_grid(monkeypatch):
    import sit_vit5.models.rope as module

    built = []
    original = module.rotary_table
    monkeypatch.setattr(
        module, "rotary_table", lambda *a, **k: built.append(a) or original(*a, **k)
    )
    model = tiny()
    for size in ((8, 8), (8, 8), (4, 8), (8, 8)):
        model(*inputs(model, size=size))
    assert len(built) == 2


def test_a_table_made_while_sampling_serves_training():
    model = randomise(tiny())
    with torch.inference_mode():
        model(*inputs(model))
    model(*inputs(model)).sum().backward()
    assert model.blocks[0].attention.qkv.weight.grad.abs().max() > 0


def test_state_dict_has_no_tables_and_loads_onto_a_meta_model():
    model = randomise(tiny())
    with torch.device("meta"):
        empty = Denoiser(model.backbone, in_channels=2, input_size=(8, 8), num_classes=3)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert not any("rope" in name for name in model.state_dict())
    assert (empty(*inputs(model)) == model(*inputs(model))).all()


@pytest.mark.parametrize("recipe", presets.RECIPES)
def test_bf16_autocast_stays_close_to_fp32(recipe):
    model = randomise(tiny(recipe))
    exact = model(*inputs(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(*inputs(model))
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("recipe", presets.RECIPES)
def test_a_network_in_bf16_weights_stays_close_to_fp32(recipe):
    model = randomise(tiny(recipe))
    exact = model(*inputs(model))
    low = model.to(torch.bfloat16)(*inputs(model))
    assert 0 < (low.float() - exact).abs().max() < 0.08 * exact.abs().max()


def test_conditioning_is_fp32_under_autocast():
    model = randomise(tiny())
    t, labels = torch.tensor([0.999, 0.9991]), torch.tensor([0, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.conditioning(t, labels)
    assert low.dtype == torch.float32
    assert (low == model.conditioning(t, labels)).all()


@pytest.mark.parametrize("labels", [[0, 3], [-1], [1000]])
def test_labels_out_of_range_are_refused_on_the_host(labels):
    with pytest.raises(UserError, match=r"label -?\d+ is not in 0..2"):
        check_labels(labels, 3)
    check_labels([0, 1, 2], 3)


def test_gradients_reach_every_trainable_parameter():
    model = randomise(tiny())
    model(*inputs(model)).square().mean().backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent
    assert not dict(tiny("SiT").named_parameters())["positions"].requires_grad


def kept_tensors_and_gradients(*, activation_checkpointing: bool) -> tuple[int, list[torch.Tensor]]:
    model, kept = randomise(tiny()), []
    model.activation_checkpointing = activation_checkpointing

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*inputs(model)).square().mean()
        count = len(kept)
    loss.backward()
    return count, [p.grad for p in model.parameters() if p.requires_grad]


def test_recomputing_keeps_less_and_gives_the_same_gradients():
    everything, gradients = kept_tensors_and_gradients(activation_checkpointing=False)
    inputs_only, again = kept_tensors_and_gradients(activation_checkpointing=True)
    assert inputs_only < 0.5 * everything
    assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))


def test_taps_are_the_patch_tokens_after_a_block():
    model = randomise(tiny())
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
    prediction, taps = model(*inputs(model), taps=(1, 2))
    assert torch.equal(prediction, model(*inputs(model)))
    assert torch.equal(taps[1], seen[0][:, :16])  # 4 x 4 patches; registers follow them
    assert taps[2].shape == (3, 16, 32)


def test_taps_under_activation_checkpointing_equal_the_plain_ones():
    model = randomise(tiny())
    plain = model(*inputs(model), taps=(1,))
    model.activation_checkpointing = True
    kept = model(*inputs(model), taps=(1,))
    torch.testing.assert_close(plain, kept)
    plain[1][1].square().mean().backward()
    expected = [p.grad.clone() for p in model.blocks[0].parameters()]
    model.zero_grad()
    kept[1][1].square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.blocks[0].parameters()], expected)


def test_a_head_predicts_from_the_tokens_after_its_block():
    model, plain = tiny(heads={"internal": 1}), tiny()
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert {name.split(".")[1] for name in added} == {"internal"}
    for name, weight in plain.state_dict().items():  # heads change no other initial weight
        assert torch.equal(model.state_dict()[name], weight)
    randomise(model)
    prediction, taps = model(*inputs(model), taps=("internal",))
    assert taps["internal"].shape == prediction.shape
    assert not torch.equal(taps["internal"], prediction)
    taps["internal"].square().mean().backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    assert all(p.grad.abs().max() > 0 for p in model.heads.parameters())


def test_a_head_on_a_block_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="head internal reads block 3 of 1 to 2"):
        tiny(heads={"internal": 3})
