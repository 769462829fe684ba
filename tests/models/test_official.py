"""Official files: recognised, built, and refused with the reason."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from helpers import golden_weights
from safetensors.torch import load_file, save_file

from sit_vit5.config.presets import RECIPES, Backbone, backbone, backbone_from_dict
from sit_vit5.models.classifier import ViT5Classifier, load_classifier, save_classifier
from sit_vit5.models.official import official_classifier, official_denoiser, read_official
from sit_vit5.utils.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"


def write(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("name, heads", [("sit_model_nosigma", 4), ("sit_model_smallact", 2)])
def test_a_sit_is_built_from_its_shapes(name, heads):
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    model = official_denoiser(golden_weights(name), Path(name), heads=heads)
    assert (model.input_size, model.num_classes) == ((8, 8), 10)
    output = model(tensors["input.x"], tensors["input.t"], tensors["input.y"])
    torch.testing.assert_close(output, tensors["output.forward"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["vit5_classifier", "vit5_classifier_options"])
def test_a_vit5_classifier_is_built_from_its_shapes_and_frequencies(name):
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    model = official_classifier(golden_weights(name), Path(name))
    if name == "vit5_classifier_options":  # no position table tells the size
        assert model.backbone.recipe.register_theta == 1000
        assert model.backbone.recipe.layer_scale == "none" and model.backbone.recipe.qkv_bias
    else:
        assert model.backbone.recipe == RECIPES["ViT5"]
        assert model.image_size == (32, 32)
    logits = model(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-4, rtol=0)


def test_files_without_rotary_buffers_are_vit5_all_the_same():
    weights = {k: t for k, t in golden_weights("vit5_classifier").items() if "freqs" not in k}
    assert official_classifier(weights, Path("x")).backbone.recipe == RECIPES["ViT5"]


def test_a_deit3_classifier_is_recognised():
    tensors = load_file(GOLDEN / "deit3_ls_classifier.safetensors")
    model = official_classifier(golden_weights("deit3_ls_classifier"), Path("x"), heads=4)
    assert model.backbone.recipe == RECIPES["DeiT3"]
    logits = model(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-4, rtol=0)


def test_training_checkpoints_give_averaged_and_raw_weights(tmp_path):
    weights = {"x_embedder.proj.weight": torch.ones(2)}
    raw = {f"module.{key}": tensor * 2 for key, tensor in weights.items()}
    content = {"model": raw, "ema": weights, "opt": {}, "args": argparse.Namespace(lr=1e-4)}
    found = read_official(write(tmp_path / "step.pt", content))
    assert found.weights["x_embedder.proj.weight"][0] == 1
    assert found.raw["x_embedder.proj.weight"][0] == 2
    bare = read_official(write(tmp_path / "bare.pt", weights))
    assert bare.raw is None and bare.is_denoiser and not bare.is_classifier
    timm = read_official(write(tmp_path / "t.pth", {"state_dict": raw, "epoch": 3}))
    assert timm.raw is None and timm.weights["x_embedder.proj.weight"][0] == 2


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_pickles_are_refused_unexecuted_and_other_files_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"more than plain tensors \(getattr\) and was not executed"
    ):
        read_official(write(tmp_path / "bad.pt", {"model": {"a": Harmful()}}))
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"a": Harmful()}))
    with pytest.raises(UserError, match="was not executed"):
        read_official(tmp_path / "old.pth")
    assert not (tmp_path / "executed").exists()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_text("")
    (tmp_path / "cut.safetensors").write_bytes(b"\0" * 5)
    for name in ("text.pt", "empty.pt", "cut.safetensors"):
        with pytest.raises(UserError, match=name):
            read_official(tmp_path / name)
    with pytest.raises(UserError, match="is no weights file"):
        read_official(tmp_path)
    with pytest.raises(UserError, match="it holds no tensors by name"):
        read_official(write(tmp_path / "number.pt", {1: torch.ones(1)}))
    with pytest.raises(UserError, match="cannot be used: epoch is not a tensor"):
        read_official(write(tmp_path / "odd.pt", {"epoch": 3}))


def test_wrong_keys_are_listed_briefly():
    weights = golden_weights("sit_model_nosigma")
    weights["extra"] = torch.ones(1)
    weights["blocks.1.attn.qkv.bias"] = torch.ones(3)
    for number in range(2):
        del weights[f"blocks.{number}.mlp.fc2.bias"]
    with pytest.raises(UserError) as error:
        official_denoiser(weights, Path("file.pt"), heads=4)
    message = str(error.value)
    assert "2 missing (blocks.0.mlp.fc2.bias, blocks.1.mlp.fc2.bias)" in message
    assert "1 unexpected (extra)" in message
    assert "1 misshapen (blocks.1.attention.qkv.bias (3,) for (192,))" in message
    with pytest.raises(UserError, match="no published size has width 64 and depth"):
        official_denoiser(golden_weights("sit_model_nosigma"), Path("file.pt"))


NORM, FREQS = "blocks.0.attn.q_norm.weight", "blocks.0.attn.rope.freqs"
FREQUENCIES = golden_weights("vit5_classifier")[FREQS]


@pytest.mark.parametrize(
    "changes",
    [
        {"x_embedder.proj.weight": torch.zeros(64, 4, 0, 0)},
        {"x_embedder.proj.weight": torch.zeros(0, 4, 2, 2)},
        {"x_embedder.proj.weight": torch.zeros(64, 4)},
        *[
            {name: torch.ones(shape)}
            for shape in ((), (3,), (2, 2, 2), (0,), (0, 64))
            for name in (
                "pos_embed",
                "y_embedder.embedding_table.weight",
                "blocks.0.mlp.fc1.bias",
                "final_layer.linear.bias",
                "final_layer.linear.weight",
                "t_embedder.mlp.0.weight",
            )
        ],
        {"blocks": torch.ones(1)},
        {"blocks.0": torch.ones(1)},
    ],
)
@pytest.mark.parametrize("from_data", [False, True])
def test_a_sit_of_odd_shapes_is_one_line(tmp_path, changes, from_data):
    weights = golden_weights("sit_model_nosigma") | changes
    with pytest.raises(UserError) as error:
        read = read_official(write(tmp_path / "x.pt", weights))
        official_denoiser(read.weights, read.path, heads=4, from_data=from_data)
    assert "x.pt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        *[{FREQS: FREQUENCIES * factor} for factor in (0, -1, 2, float("nan"))],
        *[
            {FREQS: frequencies}
            for frequencies in (torch.tensor(1.0), torch.ones(1), torch.ones(0))
        ],
        {FREQS: FREQUENCIES.flip(0)},
        {FREQS: FREQUENCIES[:, None]},
        {"blocks.1.attn.rope.freqs": FREQUENCIES**2},  # of a base that the first block has not
        *[{NORM: torch.ones(shape)} for shape in ((), (0,), (3,), (1000,))],
        *[{"reg_token": torch.ones(shape)} for shape in ((), (3,), (1, 3, 64), (1, 0, 64))],
        *[{"pos_embed": torch.ones(shape)} for shape in ((), (3,), (1, 5, 64), (1, 0, 64))],
        *[{"head.weight": torch.ones(shape)} for shape in ((), (3,), (0, 64))],
        *[
            {"patch_embed.proj.weight": torch.ones(shape)}
            for shape in ((), (64,), (64, 7), (64, 0))
        ],
        {"cls_token": torch.ones(())},
        {"geometry": torch.ones(())},
    ],
)
def test_a_classifier_of_odd_shapes_is_one_line(tmp_path, changes):
    weights = golden_weights("vit5_classifier") | changes
    with pytest.raises(UserError) as error:
        read = read_official(write(tmp_path / "x.pt", weights))
        official_classifier(read.weights, read.path)
    assert "x.pt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rotary_bases_survive_half_precision(dtype):
    weights = {k: t.to(dtype) for k, t in golden_weights("vit5_classifier").items()}
    assert official_classifier(weights, Path("x")).backbone.recipe == RECIPES["ViT5"]


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        ("ViT5", (16, 16), 3),
        ("ViT5", (8, 32), 3),
        ("ViT5", (8, 16), 1),
        ("ViT5", (8, 8), 4),
        ("DeiT3", (16, 16), 3),
        ("ViT5-no_ape", (8, 16), 3),
    ],
)
def test_our_own_state_dicts_are_read_as_released_files_are(tmp_path, name, size, channels):
    recipe = RECIPES.get(name) or backbone(f"{name}-Nano").recipe
    sizes = Backbone(32, 2, 2, patch_size=4, recipe=recipe)
    torch.manual_seed(0)
    model = ViT5Classifier(sizes, image_size=size, in_channels=channels, num_classes=5).eval()
    images = torch.randn(2, channels, *size)
    wrapped = {"_orig_mod.module." + key: tensor for key, tensor in model.state_dict().items()}
    content = {
        "epoch": 3,
        "arch": "vit5_small",
        "state_dict": wrapped,
        "args": argparse.Namespace(),
    }
    for number, saved in enumerate((model.state_dict(), content)):
        read = read_official(write(tmp_path / f"{number}.pth", saved))
        assert read.is_classifier and not read.is_denoiser
        again = official_classifier(read.weights, read.path, heads=2)
        assert (again.image_size, again.in_channels) == (size, channels)
        assert torch.equal(again(images), model(images))
        save_classifier(again, tmp_path / f"folder{number}", source={})
        assert torch.equal(load_classifier(tmp_path / f"folder{number}")(images), model(images))


def test_positions_that_name_no_grid_are_square_or_refused(tmp_path):
    model = ViT5Classifier(Backbone(32, 2, 2, patch_size=4), image_size=(8, 16), num_classes=5)
    weights = {key: tensor for key, tensor in model.state_dict().items() if key != "geometry"}
    read = read_official(write(tmp_path / "x.pth", weights))
    with pytest.raises(UserError, match="positions of 8 patches, which are no square"):
        official_classifier(read.weights, read.path)
    with pytest.raises(RuntimeError, match="positions of a grid None for .2, 4."):
        model.load_state_dict(weights)
    turned = ViT5Classifier(Backbone(32, 2, 2, patch_size=4), image_size=(16, 8), num_classes=5)
    with pytest.raises(RuntimeError, match=r"positions of a grid \(2, 4\) for \(4, 2\)"):
        turned.load_state_dict(model.state_dict())


def test_numbers_that_are_not_finite_are_refused():
    weights = golden_weights("vit5_classifier")
    weights["head.bias"] = weights["head.bias"] * float("nan")
    with pytest.raises(UserError, match="file.pt cannot be used: head.bias is not finite"):
        official_classifier(weights, Path("file.pt"))
    weights["head.weight"] = torch.tensor(1.0)
    with pytest.raises(UserError, match="is no ViT-5 classifier, by its shapes"):
        official_classifier(weights, Path("file.pt"))


def test_a_folder_of_the_user_beside_the_target_is_left_alone(tmp_path):
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "folder.partial" / "mine").touch()
    model = official_classifier(golden_weights("vit5_classifier"), Path("x"))
    save_classifier(model, tmp_path / "folder", source={})
    assert (tmp_path / "folder.partial" / "mine").exists()


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory) -> Path:
    model = official_classifier(golden_weights("vit5_classifier"), Path("x"))
    folder = tmp_path_factory.mktemp("classifier") / "folder"
    save_classifier(model, folder, source={"file": "x"})
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        *[{"image_size": value} for value in ([], [8], [10**9] * 2, "x", [0, 0], [31, 31])],
        *[{"in_channels": value} for value in (-1, 0, 10**9, 1.5)],
        *[{"num_classes": value} for value in (-1, "x", 7, None)],
        *[{"backbone": value} for value in ({}, [], None, 5)],
        {"source": 5},
    ],
)
def test_every_fact_of_a_classifier_folder_is_checked(classifier_folder, tmp_path, changes):
    folder = tmp_path / "folder"
    shutil.copytree(classifier_folder, folder)
    facts = json.loads((folder / "classifier.json").read_text()) | changes
    (folder / "classifier.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="cannot be read: .*convert .* again|do not fit") as error:
        load_classifier(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("width", "x"), ("depth", 0), ("heads", 5), ("mlp_ratio", -1), ("new", 1)]
    + [("recipe", value) for value in (None, [], {"norm": "batch"}, {"new": 1})]
    + [("recipe", {"rope_theta": "x"}), ("recipe", {"registers": 1.5})],
)
def test_every_field_of_a_backbone_is_checked(key, value):
    plain = asdict(Backbone(16, 1, 2, patch_size=2))
    assert backbone_from_dict(plain) == Backbone(16, 1, 2, patch_size=2)
    with pytest.raises(UserError, match=f"FILE cannot be read: .*({key}|norm|new|registers|theta)"):
        backbone_from_dict(plain | {key: value}, source="FILE")


def test_a_classifier_folder_reads_back_equal(tmp_path):
    model = official_classifier(golden_weights("vit5_classifier"), Path("x"))
    save_classifier(model, tmp_path / "folder", source={"file": "x"})
    again, images = load_classifier(tmp_path / "folder"), torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model(images))
    with pytest.raises(UserError, match="exists; choose another folder"):
        save_classifier(model, tmp_path / "folder", source={})
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    save_file({"cls_token": weights["cls_token"]}, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(UserError, match="missing"):
        load_classifier(tmp_path / "folder")
