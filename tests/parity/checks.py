"""How each kind of fixture is compared. A new kind is one function and one line in `CHECKS`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from comparison import Check, Tensors, difference, official_sit, official_weights
from flow_checks import (
    samplers_likelihood,
    samplers_ode,
    samplers_sde,
    samplers_sit,
    transport,
    transport_intervals,
)
from metric_checks import adm_metrics
from safetensors.torch import load_file
from trajectory_checks import trajectory

from sit_vit5.config import presets
from sit_vit5.data.transforms import center_crop, read_rgb
from sit_vit5.flow.loss import drop_labels
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import RMSNorm, sincos_positions, timestep_embedding
from sit_vit5.models.official import sit_state_dict, vit5_state_dict
from sit_vit5.models.rope import rotary_angles, rotate


def cfg_on_three_channels(facts: dict, tensors: Tensors, model: Denoiser) -> Iterator[Check]:
    """Official guidance: of the first three channels only, on a doubled batch of equal inputs."""
    for scale, case in facts.get("cfg", {}).get("scales", {}).items():
        x, t, y = (tensors[f"cfg.input.{name}"] for name in "xty")
        half = len(x) // 2
        prediction = model(torch.cat([x[:half], x[:half]]), t, y)
        v_class, v_null = prediction[:, :3].chunk(2)
        guided = v_null + float(scale) * (v_class - v_null)
        ours = torch.cat([torch.cat([guided, guided]), prediction[:, 3:]], dim=1)
        error = difference(ours, tensors[f"cfg.output.scale_{scale}"])
        yield Check(f"cfg {scale}", error, case["tolerance_max_abs"])


def sit_model(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    model, official = official_sit(facts, tensors)
    x, t, y = (tensors[f"input.{name}"] for name in "xty")
    output = model(x, t, y)
    expected = tensors["output.forward"]
    yield Check("forward", difference(output, expected), facts["tolerance"]["forward_max_abs"])
    features = timestep_embedding(t, 256)
    yield Check("t_freq_256", difference(features, tensors["inter.t_freq_256"]), 1e-4)
    yield from cfg_on_three_channels(facts, tensors, model)
    if "label.embedding" in tensors:
        drop = tensors["label.force_drop_ids"]
        labels = drop_labels(y, 1 - drop, class_dropout=0.5, null_label=model.null_label)
        embedding = model.conditioning.labels(labels)
        yield Check("label.embedding", difference(embedding, tensors["label.embedding"]), 0)
    output.square().mean().backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # The official names in our order: convert a dictionary that maps every key to itself.
    for key, norm in facts["grad_l2"]["values"].items():
        (name,) = sit_state_dict({key: official[key]}, model)
        error = abs(ours[name].norm().item() - norm)
        yield Check(f"grad_l2 {key}", error, 2e-4 * abs(norm) + 1e-6)


def official_vit5(
    sizes: dict, tensors: Tensors, image_size: int | None = None
) -> tuple[ViT5Classifier, Tensors]:
    """Our classifier with the fixture's weights at a size, and the official weights."""
    deit = "num_registers" not in sizes
    scaled = sizes["layer_scale"]
    recipe = presets.Recipe(
        norm="layer" if sizes.get("norm", "RMSNorm").startswith("LayerNorm") else "rms",
        mlp="gelu",
        layer_scale="product" if scaled else "none",
        qk_norm=sizes.get("qk_norm", False),
        qkv_bias=sizes["qkv_bias"],
        position="learned" if deit or sizes["ape"] else "none",
        rope_theta=10000.0 if sizes.get("rope") else None,
        registers=sizes.get("num_registers", 0),
        register_theta=sizes["reg_theta"] if sizes.get("num_registers") else None,
    )
    backbone = presets.Backbone(
        width=sizes["embed_dim"],
        depth=sizes["depth"],
        heads=sizes["num_heads"],
        patch_size=sizes["patch_size"],
        mlp_ratio=sizes["mlp_ratio"],
        recipe=recipe,
    )
    side = image_size or sizes["img_size"]
    model = ViT5Classifier(
        backbone,
        image_size=(side, side),
        in_channels=sizes["in_chans"],
        num_classes=sizes["num_classes"],
    )
    official = official_weights(tensors)
    model.load_state_dict(vit5_state_dict(official, model))
    return model.eval(), official


def vit5_classifier(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    model, official = official_vit5(facts["hyperparameters"], tensors)
    tolerance = facts["tolerance"]
    images = tensors["input.images"]
    features = model.forward_features(images)
    logits = model(images)
    yield Check(
        "features",
        difference(features.cls, tensors["output.features"]),
        tolerance.get("features_max_abs", tolerance["logits_max_abs"]),
    )
    error = difference(logits, tensors["output.logits"])
    yield Check("logits", error, tolerance["logits_max_abs"])
    states = model.forward_blocks(images)
    for number, state in enumerate(states):
        name = f"block{number - 1}_out" if number else "tokens_in"
        if f"inter.{name}" in tensors:
            error = difference(state, tensors[f"inter.{name}"])
            yield Check(name, error, tolerance["features_max_abs"])
    logits.square().mean().backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    for key, norm in facts.get("grad_l2", {}).get("values", {}).items():
        name, *_ = vit5_state_dict({key: official[key]}, model)  # the geometry may follow
        error = abs(ours[name].norm().item() - norm)
        yield Check(f"grad_l2 {key}", error, 2e-4 * abs(norm) + 1e-6)


def vit5_resized(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    weights = load_file(folder / facts["base_params"])
    for name, case in facts["cases"].items():
        images, tolerance = tensors[f"{name}.input.images"], case["tolerance"]["logits_max_abs"]
        expected = tensors[f"{name}.output.logits"]
        fresh, _ = official_vit5(facts["hyperparameters"], weights, case["img_size"])
        yield Check(f"{name} converted", difference(fresh(images), expected), tolerance)
        trained, _ = official_vit5(facts["hyperparameters"], weights)
        yield Check(f"{name} run larger", difference(trained(images), expected), tolerance)


def sincos_tables(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    tolerance = facts["tolerance"]
    for name, table in facts["tables"].items():
        if not name.startswith("grid"):
            continue
        tokens, width = table["shape"]
        side = round(tokens**0.5)
        ours = sincos_positions((side, side), width)
        if name in tensors:
            found = difference(ours, tensors[name])
        else:
            found = difference(ours[tensors[f"{name}.rows"]], tensors[f"{name}.slice"])
        yield Check(name, found, tolerance["pos_embed_max_abs"])
        flat = ours.double().flatten()
        weighted = (flat * torch.cos(0.37 * torch.arange(len(flat)).double())).sum().item()
        error = abs(weighted - table["weighted_sum"]) / len(flat)
        yield Check(f"{name} weighted sum", error, tolerance["pos_embed_max_abs"])
    for name in (name for name in tensors if name.startswith("timestep_embedding_")):
        ours = timestep_embedding(tensors["timesteps"], tensors[name].shape[1])
        yield Check(name, difference(ours, tensors[name]), tolerance["timestep_embedding_max_abs"])


def rope(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    for name, case in facts["cases"].items():
        grid, trained = ((case[side], case[side]) for side in ("grid", "pt_seq_len"))
        angles = rotary_angles(grid, case["head_dim"], case["theta"], extent=trained)
        table = torch.stack([angles.cos(), angles.sin()], dim=-1).float()
        q = tensors[f"{name}.q"].transpose(1, 2)  # (B, K, N, d)
        rotated = rotate(q, table).transpose(1, 2)
        tolerance = facts["tolerance"]["max_abs"]
        yield Check(f"{name}.rotated", difference(rotated, tensors[f"{name}.rotated"]), tolerance)
        for kind, ours in zip(("cos", "sin"), table.unbind(-1), strict=True):
            per_channel = ours.repeat_interleave(2, dim=1)
            error = difference(per_channel, tensors[f"{name}.{kind}"])
            yield Check(f"{name}.{kind}", error, tolerance)


def rmsnorm(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    norm = RMSNorm(len(tensors["weight"]), affine=True)
    norm.weight.data = tensors["weight"]
    expected = tensors["out_f32"]
    relative = ((norm(tensors["x_f32"]) - expected) / expected).abs().max().item()
    yield Check("f32 relative", relative, facts["tolerance"]["f32_max_rel"])
    promoted = norm(tensors["x_bf16"])
    one_ulp = 2**-7 * tensors["out_from_bf16_x_f32_weight"].abs().max().item()
    error = difference(promoted, tensors["out_from_bf16_x_f32_weight"])
    yield Check("bf16 input, f32 weight", error, one_ulp)
    yield Check("bf16 input, f32 weight gives f32", float(promoted.dtype != torch.float32), 0)


def center_crop_images(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    for case in facts["cases"]:
        image = read_rgb(folder / "center_crop" / case["image"])
        ours = torch.from_numpy(center_crop(image, case["image_size"]).copy())
        yield Check(case["key"], difference(ours, tensors[case["key"]]), 0)


# Official classifier -> our name.
CLASSIFIERS = {
    "vit5_small": "ViT5-S/16",
    "vit5_base": "ViT5-B/16",
    "vit5_large": "ViT5-L/16",
    "vit5_xlarge": "ViT5-XL/16",
    "deit_small_patch16_LS": "DeiT3-S/16",
    "deit_base_patch16_LS": "DeiT3-B/16",
    "deit_large_patch16_LS": "DeiT3-L/16",
}


def param_counts(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    for name, case in facts["classifiers"].items():
        totals = {224: case["params"]["total"]}
        for side in (192, 384):
            totals[side] = case.get(f"params_total_at_{side}")
        for side, total in totals.items():
            if total is None:
                continue
            with torch.device("meta"):
                model = ViT5Classifier(
                    presets.backbone(CLASSIFIERS[name.split()[0]]), image_size=(side, side)
                )
            found = sum(p.numel() for p in model.parameters())
            yield Check(f"{name} at {side}", abs(found - total), 0)
    for name, case in facts["sit_dit"].items():
        if not name.startswith("SiT") or "learn_sigma=True" in name:
            continue
        model_name = name.split()[0]
        with torch.device("meta"):
            model = Denoiser(
                presets.backbone(model_name), in_channels=4, input_size=(32, 32), num_classes=1000
            )
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        yield Check(f"{name} total", abs(total - case["total"]), 0)
        yield Check(f"{name} trainable", abs(trainable - case["trainable"]), 0)


# Pattern of the fixture's name -> comparison.
CHECKS = {
    "vit5_classifier": vit5_classifier,
    "vit5_classifier_smallact": vit5_classifier,
    "vit5_classifier_options": vit5_classifier,
    "vit5_classifier_resized": vit5_resized,
    "deit3_ls_classifier": vit5_classifier,
    "sit_model_*": sit_model,
    "dit_model_*": sit_model,
    "sincos_tables": sincos_tables,
    "rope": rope,
    "rmsnorm": rmsnorm,
    "center_crop": center_crop_images,
    "transport": transport,
    "transport_intervals": transport_intervals,
    "samplers_ode": samplers_ode,
    "samplers_sde": samplers_sde,
    "samplers_likelihood": samplers_likelihood,
    "samplers_sit": samplers_sit,
    "adm_metrics": adm_metrics,
    "param_counts": param_counts,
    "trajectory_*": trajectory,
}
