"""Extractors: what they give, of what they are made, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from sit_vit5.metrics import EXTRACTORS, build_extractor, extract_features, extract_statistics
from sit_vit5.metrics.features import find_inception_weights
from sit_vit5.metrics.features import timm as timm_model
from sit_vit5.utils.errors import UserError

# The smallest transformer and the smallest convolutional network of timm.
TINY, TINY_CNN = "test_vit", "test_byobnet"


def images(count: int, side: int = 32, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (count, side, side, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> Path:
    """timm's smallest transformer, its head included, with random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("timm") / "tiny.safetensors"
    save_file(timm.create_model(TINY).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def inception(inception_file):
    return build_extractor("inception", str(inception_file))


def test_inception_gives_the_librarys_pool_features_and_logits_without_bias(
    inception, inception_file
):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    given = images(3)
    found = inception(given, ("pool", "logits"))
    library = FeatureExtractorInceptionV3(
        "official",
        ["2048", "logits_unbiased", "logits"],
        feature_extractor_weights_path=str(inception_file),
    ).eval()
    with torch.no_grad():
        pool, logits, biased = library(torch.from_numpy(given).permute(0, 3, 1, 2))
    assert found["pool"].shape == (3, 2048) and found["logits"].shape == (3, 1008)
    assert found["pool"].std() > 0.1  # the random weights say something
    for ours, theirs in ((found["pool"], pool), (found["logits"], logits)):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * theirs.abs().max())
    assert np.abs(found["logits"] - biased.numpy()).min() > 1
    assert len(inception.identity["weights_sha256"]) == 64


def test_spatial_features_are_seven_channels_of_mixed_6_with_the_channels_last(inception):
    network, given = inception.network, images(2)
    seen = {}
    hook = network.Mixed_6d.register_forward_pre_hook(lambda module, x: seen.update(x=x[0]))
    found = inception(given, ("spatial",))["spatial"]
    hook.remove()
    branch = network.Mixed_6d.branch1x1
    with torch.inference_mode():
        expected = torch.relu(branch.bn(branch.conv(seen["x"]))).numpy()
    assert found.shape == (2, 7 * 17 * 17)
    for row, column, channel in ((0, 0, 0), (0, 1, 6), (16, 3, 2)):
        value = expected[:, channel, row, column]
        place = (row * 17 + column) * 7 + channel
        np.testing.assert_allclose(found[:, place], value, rtol=1e-5, atol=1e-6)


def test_inception_features_hardly_depend_on_the_batch(inception):
    given = images(8)
    whole = inception(given, inception.outputs)
    parts = [inception(part, inception.outputs) for part in (given[:3], given[3:])]
    for output, rows in whole.items():
        again = np.concatenate([part[output] for part in parts])
        # Stated in the docs: rounding of fp32.
        np.testing.assert_allclose(again, rows, atol=1e-5 * np.abs(rows).max())


@pytest.mark.parametrize("name", EXTRACTORS)
def test_every_extractor_gives_a_finite_row_per_image_grey_or_rgb(
    name, inception_file, tiny_file, monkeypatch
):
    monkeypatch.setattr(timm_model, "DINOV2", TINY)  # DINOv2 itself has 300 million weights
    weights = {"pixels": None, "inception": inception_file}.get(name, tiny_file)
    extractor = build_extractor(f"{name}:{TINY}" if name == "timm" else name, weights)
    assert extractor.identity["features"].split(":")[0] == name and "pool" in extractor.outputs
    grey = images(2, 16, 1)
    found = extractor(grey, extractor.outputs)
    for rows in found.values():
        assert rows.ndim == 2 and len(rows) == 2 and np.isfinite(rows).all() and rows.std() > 0
    if name != "pixels":
        rgb = extractor(grey.repeat(3, axis=3))["pool"]
        np.testing.assert_allclose(rgb, found["pool"], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=f"features {name}.* give pool.*, not smell"):
        extractor(grey, ("smell",))


def test_timm_features_are_the_models_own_on_images_of_its_size(tiny_file):
    extractor = build_extractor(f"timm:{TINY}", tiny_file)
    assert extractor.identity["size"] == [160, 160]
    given = images(2, 160)
    model = timm.create_model(TINY, num_classes=0).eval()
    weights = timm.models.load_state_dict(str(tiny_file))
    model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("head.")})
    config = model.pretrained_cfg
    mean, deviation = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    pixels = torch.from_numpy(given).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        expected = model((pixels - mean) / deviation)
    np.testing.assert_allclose(extractor(given)["pool"], expected, rtol=1e-4, atol=1e-5)


def test_dinov2_is_a_model_of_timm_at_224_pixels(tiny_file, monkeypatch):
    monkeypatch.setattr(timm_model, "DINOV2", TINY)
    extractor = build_extractor("dinov2", tiny_file)
    assert extractor.identity["size"] == [224, 224] and extractor.identity["model"] == TINY
    assert extractor(images(1, 16))["pool"].shape == (1, 64)


def test_features_and_statistics_of_a_pass_are_those_of_all_images_in_order():
    given, pixels = images(23, 4, 1), build_extractor("pixels")
    how = {"title": "samples", "total": 23}
    batches = [given[:5], given[5:6], given[6:]]
    rows = extract_features(pixels, batches, **how)["pool"]
    np.testing.assert_array_equal(rows, given.reshape(23, 16) / 255)
    found = extract_statistics(pixels, batches, **how)["pool"]
    np.testing.assert_allclose(found.covariance, np.cov(rows, rowvar=False), rtol=1e-12)
    with pytest.raises(UserError, match="samples: no images"):
        extract_features(pixels, [], **how)


def test_missing_weights_say_how_to_get_them_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cases = [
        (lambda: find_inception_weights(None), r"download https://.*--weights FILE"),
        (lambda: build_extractor("inception", option="--own"), r"download https://.*--own FILE"),
        (lambda: build_extractor("dinov2", option="--own"), r"hf download .*--own FILE"),
        (lambda: build_extractor("inception", "no.pth"), "no.pth do not exist"),
        (
            lambda: build_extractor("dinov2"),
            "hf download timm/vit_large_patch14_dinov2.lvd142m model.safetensors.*--weights FILE",
        ),
        (lambda: build_extractor("timm:resnet18", "no.pth"), "no.pth do not exist"),
    ]
    for build, message in cases:
        with pytest.raises(UserError, match=message) as error:
            build()
        assert "\n" not in str(error.value)


def test_unknown_extractors_say_the_nearest_name():
    for name, message in (
        ("inceptoin", "unknown features 'inceptoin'; nearest: inception"),
        ("timm:resnet81", "timm has no model 'resnet81'; nearest: .*resnet"),
        ("timm", "timm takes a model's name, such as timm:NAME"),
        ("pixels:4", "timm takes a model's name"),
    ):
        with pytest.raises(UserError, match=message):
            build_extractor(name)
    with pytest.raises(UserError, match="--weights has no use with features pixels"):
        build_extractor("pixels", "x.pth")


def test_a_pickle_in_place_of_weights_is_refused_unexecuted(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "bomb.pth").write_bytes(pickle.dumps(Bomb(), protocol=2))
    torch.save({"x": Bomb()}, tmp_path / "bomb2.pth")
    for name in ("bomb.pth", "bomb2.pth"):
        for extractor in ("inception", f"timm:{TINY}"):
            with pytest.raises(UserError, match="was not executed"):
                build_extractor(extractor, str(tmp_path / name))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("features", ["inception", "dinov2", f"timm:{TINY}"])
def test_a_pointer_or_a_page_in_place_of_weights_is_named(tmp_path, monkeypatch, features):
    monkeypatch.setattr(timm_model, "DINOV2", TINY)
    for content, reason in (
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a", "a pointer of Git LFS"),
        ("<!doctype html>", "a web page"),
    ):
        (tmp_path / "weights.pth").write_text(content)
        with pytest.raises(UserError, match=f"weights.pth cannot be read: it is {reason}") as error:
            build_extractor(features, str(tmp_path / "weights.pth"))
        assert "weights_only" not in str(error.value)


def test_weights_that_are_not_finite_or_integers_are_refused(tiny_file, tmp_path):
    weights = load_file(tiny_file)
    name = next(iter(weights))
    for tensor, reason in ((weights[name] * np.nan, "is not finite"), (weights[name].long(), name)):
        save_file(weights | {name: tensor}, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=reason):
            build_extractor(f"timm:{TINY}", str(tmp_path / "x.safetensors"))


def test_a_foreign_state_dict_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    for name in ("other.pth", "other.safetensors", "cut.safetensors"):
        with pytest.raises(UserError, match="a weights file of timm"):
            build_extractor(f"timm:{TINY_CNN}", str(tmp_path / name))
    with pytest.raises(UserError, match="is not torch-fidelity's Inception weights"):
        build_extractor("inception", str(tmp_path / "other.pth"))
