"""The classifiers under timm's names: what timm's scripts and users call on a model of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from helpers import ROOT, command_environment
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_data_config
from timm.models import load_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import Tensor
from torch.nn import functional as F

from sit_vit5.interop.timm import TimmViT5, run_script
from sit_vit5.models.classifier import ViT5Classifier
from sit_vit5.models.layers import resize_positions
from sit_vit5.utils.errors import UserError

NAMES = ("vit5_small", "vit5_base", "vit5_large", "vit5_xlarge")
GOLDEN = Path(__file__).parents[1] / "golden"
# The sizes of the golden fixture vit5_classifier.
OFFICIAL = dict(img_size=32, patch_size=4, embed_dim=64, depth=3, num_heads=4)


def tiny(name: str = "vit5_base", **options) -> TimmViT5:
    torch.manual_seed(0)
    sizes = dict(embed_dim=32, depth=3, num_heads=2, patch_size=4, img_size=16, num_classes=5)
    model = timm.create_model(name, **{**sizes, **options})
    for key, parameter in model.named_parameters():
        if "gamma" in key:
            parameter.data.fill_(0.5)
    return model.eval()


def images(size: tuple[int, int] = (16, 16)) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A checkpoint as the official main.py writes it, with the fixture's weights averaged."""
    weights = {
        key.removeprefix("param."): tensor
        for key, tensor in load_file(GOLDEN / "vit5_classifier.safetensors").items()
        if key.startswith("param.")
    }
    raw = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
    torch.save({"model": raw, "model_ema": weights, "epoch": 3}, tmp_path / "vit5.pth")
    return tmp_path / "vit5.pth"


def load(file: Path, *, classes: int = 10, **options) -> TimmViT5:
    """The model of the fixture's sizes; classes: of the file's head."""
    overlay = dict(file=str(file), num_classes=classes)
    sizes = {**OFFICIAL, **options}
    return timm.create_model("vit5_base", pretrained=True, pretrained_cfg_overlay=overlay, **sizes)


@pytest.mark.parametrize("name", NAMES)
def test_models_have_the_released_number_of_parameters(name):
    facts = json.loads((GOLDEN / "param_counts.json").read_text())["classifiers"][name]
    for options, count in (
        ({}, facts["params"]["total"]),
        ({"num_classes": 0}, facts["params_num_classes_0"]),
        ({"img_size": 384}, facts["params_total_at_384"]),
    ):
        with torch.device("meta"):
            model = timm.create_model(name, **options)
        assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_tags_name_the_released_files_and_their_preprocessing():
    assert timm.list_pretrained("vit5*") == [
        "vit5_base.in1k_224",
        "vit5_base.in1k_384",
        "vit5_large.in1k_224",
        "vit5_small.in1k_224",
    ]
    sizes = dict(embed_dim=32, depth=1, num_heads=2)
    for tag, size in (("vit5_large", 224), ("vit5_large.in1k_384", 384)):
        model = timm.create_model(tag, **sizes)
        assert len(model.positions) == (size // 16) ** 2
        data = resolve_data_config({}, model=model)
        assert data["input_size"] == (3, size, size) and data["crop_pct"] == 1.0
        assert data["mean"] == IMAGENET_DEFAULT_MEAN and data["std"] == IMAGENET_DEFAULT_STD
        assert data["interpolation"] == "bicubic"
    assert model.default_cfg["tag"] == "in1k_384"


def test_model_is_the_classifier_with_the_same_weights():
    model = tiny()
    plain = ViT5Classifier(model.backbone, image_size=(16, 16), num_classes=5).eval()
    plain.load_state_dict(model.state_dict())
    for size in ((16, 16), (8, 24)):
        torch.testing.assert_close(model(images(size)), plain(images(size)))
    features, tokens = plain.forward_features(images()), model.forward_features(images())
    assert tokens.shape == (2, 1 + 4 + 16, 32) and model.num_prefix_tokens == 5
    torch.testing.assert_close(tokens[:, 0], features.cls)
    torch.testing.assert_close(tokens[:, 1:5], features.registers)
    torch.testing.assert_close(tokens[:, 5:], features.patches)
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), features.cls)


@pytest.mark.parametrize(
    ("old", "new"),
    [((8, 32), (16, 16)), ((8, 32), (32, 32)), ((8, 32), (32, 8)), ((8, 16), (16, 16))],
)
def test_positions_are_those_of_the_source_at_that_size(tmp_path, old, new):
    source = tiny(img_size=old)
    torch.nn.init.normal_(source.positions)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    overlay = {"file": str(tmp_path / "a.pth"), "num_classes": 5}
    loaded = tiny(img_size=new, pretrained=True, pretrained_cfg_overlay=overlay)
    expected = source._positions_on((new[0] // 4, new[1] // 4))
    assert torch.equal(loaded.positions, expected)
    assert torch.equal(loaded(images(new)), source(images(new)))


def test_set_input_size_resamples_in_place():
    model, given = tiny(img_size=(8, 16), dynamic_img_size=True), images((16, 12))
    before = model(given)
    model.set_input_size(img_size=(16, 12))
    assert model.image_size == (16, 12) and model.positions.shape == (12, 32)
    assert model.positions.requires_grad and torch.equal(model(given), before)
    with pytest.raises(UserError, match="patch_size 8 cannot be set: the weights are for 4"):
        model.set_input_size(patch_size=8)


def test_dynamic_img_pad_pads_with_zeros():
    model = tiny(dynamic_img_pad=True)
    given, padded = images((13, 16)), torch.zeros(2, 3, 16, 16)
    padded[:, :, :13] = given
    assert torch.equal(model(given), model(padded))
    assert model.forward_intermediates(given, intermediates_only=True)[0].shape[-2:] == (4, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patch_drop_rate", 0.1),
        ("proj_drop_rate", 0.1),
        ("attn_drop_rate", 0.1),
        ("class_token", False),
        ("reg_tokens", 0),
    ],
)
def test_arguments_that_vit5_lacks_are_one_line(name, value):
    with pytest.raises(UserError, match=f"{name}.*drop it"):
        tiny(**{name: value})
    assert tiny(patch_drop_rate=0.0, class_token=True, reg_tokens=4).num_prefix_tokens == 5


def test_sizes_and_attributes_are_those_timm_reads():
    model = tiny(in_chans=1, img_size=(16, 8))
    assert model(torch.randn(2, 1, 16, 8)).shape == (2, 5)
    assert model.num_features == model.head_hidden_size == model.embed_dim == 32
    assert model.num_classes == 5 and model.get_classifier() is model.head
    assert model.default_cfg == model.pretrained_cfg and model.default_cfg["classifier"] == "head"
    assert len(model.positions) == 4 * 2


def test_unknown_options_and_poolings_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'qkv_bias'"):
        tiny(qkv_bias=True)
    with pytest.raises(UserError, match="global_pool 'max' must be 'token', 'avg' or ''"):
        tiny(global_pool="max")
    with pytest.raises(UserError, match="global_pool 'map' must be"):
        tiny().reset_classifier(3, "map")
    with pytest.raises(UserError, match="output_fmt 'NHWC' must be"):
        tiny().forward_intermediates(images(), output_fmt="NHWC")


def test_drop_rates_act_in_training():
    for option, level in (("drop_rate", "head"), ("drop_path_rate", "blocks")):
        model = tiny(**{option: 0.5}).train()
        same = [torch.equal(f(images()), f(images())) for f in (model.forward_features, model)]
        assert same == ([True, False] if level == "head" else [False, False])
        model.eval()
        assert torch.equal(model(images()), tiny()(images()))


def test_reset_classifier_changes_classes_and_pooling():
    model = tiny()
    tokens = model.forward_features(images())
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7) and model.global_pool == "token"
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(images()), tokens[:, 5:].mean(1))
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images()), tokens)


def test_intermediates_are_the_tokens_after_the_blocks():
    model = tiny()
    states = model.forward_blocks(images((8, 16)))[1:]  # cls, patches, registers
    final, features = model.forward_intermediates(images((8, 16)))
    torch.testing.assert_close(final, model.forward_features(images((8, 16))))
    assert len(features) == 3
    for state, feature in zip(states, features, strict=True):
        assert feature.shape == (2, 32, 2, 4)
        torch.testing.assert_close(feature[:, :, 1, 2], state[:, 1 + 4 + 2])
    flat = dict(output_fmt="NLC", intermediates_only=True)
    ((patches, prefix),) = model.forward_intermediates(
        images((8, 16)), [0], norm=True, return_prefix_tokens=True, **flat
    )
    normed = model.split(model.norm(states[0]))
    torch.testing.assert_close(patches, normed.patches)
    torch.testing.assert_close(prefix, torch.cat([normed.cls.unsqueeze(1), normed.registers], 1))
    last = model.forward_intermediates(images((8, 16)), 2, **flat)
    torch.testing.assert_close(last[0], model.split(states[1]).patches)
    assert len(last) == 2


def test_stopping_early_skips_the_later_blocks():
    model, calls = tiny(), []
    model.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    model.forward_intermediates(images(), [0, 1])
    assert len(calls) == 1
    final, features = model.forward_intermediates(images(), [0, 1], stop_early=True)
    assert len(calls) == 1 and len(features) == 2
    pruned = tiny()
    assert pruned.prune_intermediate_layers([0, -2], prune_norm=True) == [0, 1]
    assert len(pruned.blocks) == 2 and isinstance(pruned.head, torch.nn.Identity)
    torch.testing.assert_close(model.norm(pruned(images())), final)


def test_features_only_gives_maps_of_the_blocks_asked_for():
    whole = tiny()
    extractor = tiny(features_only=True, out_indices=(0, -2))
    maps = extractor(images())
    assert [tuple(m.shape) for m in maps] == [(2, 32, 4, 4)] * 2
    expected = whole.forward_intermediates(images(), [0, 1], intermediates_only=True)
    torch.testing.assert_close(maps, expected)
    assert extractor.feature_info.channels() == [32, 32]
    assert extractor.feature_info.reduction() == [4, 4]
    assert extractor.feature_info.module_name() == ["blocks.0", "blocks.1"]
    assert len(extractor.model.blocks) == 2


def test_layer_decay_takes_every_parameter_once():
    model = tiny()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    scale, decay = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.pop(id(parameter))  # a second time is a KeyError
            scale[name], decay[name] = group["lr_scale"], group["weight_decay"]
    assert not names
    for name in ("cls_token", "positions", "registers", "patch_embed.proj.weight"):
        assert scale[name] == 0.5**4
    for number in range(3):
        assert scale[f"blocks.{number}.attention.qkv.weight"] == 0.5 ** (3 - number)
    assert scale["norm.weight"] == 0.5 and scale["head.weight"] == 1
    undecayed = ("cls_token", "positions", "registers", "norm.weight", "blocks.0.gate1.gamma")
    assert {decay[name] for name in undecayed} == {0}
    assert decay["head.weight"] == decay["patch_embed.proj.weight"] == 0.1


def test_gradient_checkpointing_runs_blocks_again_for_the_same_gradients():
    gradients, calls = [], []
    for enable in (False, True):
        model = tiny(drop_path_rate=0.3).train()
        model.blocks[0].mlp.register_forward_hook(lambda *_, e=enable: calls.append(e))
        model.set_grad_checkpointing(enable)
        torch.manual_seed(2)
        model(images()).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert calls == [False, True, True]
    torch.testing.assert_close(gradients[0], gradients[1])
    with torch.no_grad():
        model(images())
    assert len(calls) == 4


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_an_official_file_gives_the_official_logits(official, suffix):
    golden = load_file(GOLDEN / "vit5_classifier.safetensors")
    if suffix == ".safetensors":
        averaged = torch.load(official, weights_only=True)["model_ema"]
        official = official.with_suffix(suffix)
        save_file(averaged, official)
    model = load(official).eval()
    torch.testing.assert_close(
        model(golden["input.images"]), golden["output.logits"], atol=2e-5, rtol=0
    )


def test_a_checkpoint_timm_has_not_opened_gives_its_averaged_weights(official):
    # As the hub's download of a .pth arrives: the file's dictionary, not the weights in it.
    overlay = dict(state_dict=torch.load(official), num_classes=10)
    options = dict(OFFICIAL, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=10)
    whole = timm.create_model("vit5_base", **options)
    torch.testing.assert_close(whole.state_dict(), load(official).state_dict())


def test_an_official_file_fits_other_classes_sizes_and_channels(official):
    released = load(official)
    other = load(official, num_classes=3, img_size=(48, 16), in_chans=1)
    assert other.head.weight.shape == (3, 64)
    torch.testing.assert_close(
        other.positions, resize_positions(released.positions, (8, 8), (12, 4))
    )
    kernel = released.patch_embed.proj.weight.unflatten(1, (3, 16))
    torch.testing.assert_close(other.patch_embed.proj.weight, kernel.sum(1))
    torch.testing.assert_close(
        other.blocks[2].gate1.gamma, torch.load(official)["model_ema"]["blocks.2.gamma_1"]
    )
    maps = load(official, features_only=True, out_indices=[1])(torch.randn(1, 3, 32, 32))
    assert maps[0].shape == (1, 64, 8, 8)


def test_a_file_of_another_model_is_refused_even_with_another_head(official, tmp_path):
    weights = torch.load(official)["model_ema"]
    torch.save({k: t for k, t in weights.items() if ".1." not in k}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"13 tensors are missing, such as blocks.1.attention.k"):
        load(tmp_path / "other.pth", num_classes=3)


class Payload:
    """Makes a folder when unpickled with code allowed."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_a_weight_file_is_not_run(tmp_path):
    torch.save({"model": Payload(tmp_path / "run")}, tmp_path / "evil.pth")
    with pytest.raises(Exception, match="weights_only"):
        load(tmp_path / "evil.pth")
    assert not (tmp_path / "run").exists()


def test_training_as_timms_script_does_it_learns_and_its_checkpoint_loads(tmp_path):
    model = tiny(num_classes=2, drop_path_rate=0.1, depth=2).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, layer_decay=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=30, warmup_epochs=2)
    average = ModelEmaV3(model, decay=0.8)
    labels = torch.arange(16) % 2
    torch.manual_seed(3)
    losses = []
    for step in range(30):
        inputs = torch.randn(16, 3, 16, 16) + labels.view(-1, 1, 1, 1)  # class 1 is brighter
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model, step=step)
        scheduler.step(step + 1)
        losses.append(loss.item())
    assert sum(losses[-3:]) / 3 < 0.1 < 0.5 < losses[0]
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(epoch=0, metric=1.0)
    fresh = tiny(num_classes=2, depth=2)
    load_checkpoint(fresh, str(tmp_path / "last.pth.tar"), use_ema=True)
    average.module.eval()
    torch.testing.assert_close(fresh(images()), average.module(images()))


SCRIPT = """
import pickle, sys
import neighbour, timm
model = timm.create_model(sys.argv[2], embed_dim=32, depth=1, num_heads=2, img_size=32)
assert __name__ == "__main__"
print(sys.argv[1:], type(pickle.loads(pickle.dumps(model))).__module__, neighbour.WORD)
sys.exit(7)
"""


def run_module(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "sit_vit5.interop.timm"]
        + [str(argument) for argument in arguments],
        env=command_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_runner_runs_a_script_with_the_models_and_its_own_arguments(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("WORD = 'found'")
    finished = run_module(tmp_path / "train.py", "--model", "vit5_small", "--lr=1")
    assert finished.returncode == 7, finished.stderr[-2000:]
    assert finished.stdout.split("] ")[1].split() == ["sit_vit5.interop.timm", "found"]
    assert finished.stdout.startswith("['--model', 'vit5_small', '--lr=1']")


def test_runner_without_a_script_is_one_line_and_status_2():
    finished = run_module()
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: no script is given; use") and "train.py --model" in line
    with pytest.raises(UserError, match=r"absent.py is no file; use python -m sit_vit5.inter"):
        run_script(["absent.py", "--model", "vit5_base"])


def test_package_imports_timm_only_with_this_module():
    code = (
        "import sys, sit_vit5.models.classifier, sit_vit5.models.official, sit_vit5.config.parse; "
    )
    code += "sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=command_environment()).returncode == 0
