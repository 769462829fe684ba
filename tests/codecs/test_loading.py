"""Finding autoencoders: their classes, weights and origins, offline, and those that draw grids."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from autoencoders import random_autoencoder
from safetensors.torch import load_file, save_file

from sit_vit5.codecs import CODECS, TINY, build_codec, configured_codec
from sit_vit5.codecs.autoencoder import AUTOENCODERS
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import CodecConfig, TrainConfig
from sit_vit5.config.parse import parse_train
from sit_vit5.sampling.grid import preview_codec
from sit_vit5.utils.errors import UserError

WEIGHTS = "diffusion_pytorch_model.safetensors"


def test_an_autoencoder_of_another_class_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="sd-vae-ema is an AutoencoderKL.*an AutoencoderDC; use"):
        build_codec("sd-vae-ema", folders["dc"])
    with pytest.raises(UserError, match="taesd is an AutoencoderTiny.*an AutoencoderKL"):
        build_codec("taesd", folders["scale"])
    for class_name in ("UNet2DModel", "ModelMixin", "AutoencoderKLFlux2", None):
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": class_name}))
        with pytest.raises(UserError, match=f"class {class_name}; a codec can be AutoencoderKL, A"):
            build_codec("diffusers", str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="of the class None"):
        build_codec("diffusers", str(tmp_path))


def test_missing_weights_are_refused_and_old_names_of_theirs_are_read(folders, tmp_path):
    vae = random_autoencoder("scale")
    vae.save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    # The names in stabilityai/sd-vae-ft-ema and -mse.
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, tensor in weights.items():
        for new_part, old_part in old.items():
            name = name.replace(f".{new_part}.", f".{old_part}.")
        renamed[name] = tensor
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / WEIGHTS)
    read = build_codec("sd-vae-ema", str(tmp_path))
    assert read.identity == build_codec("sd-vae-ema", folders["scale"]).identity
    del weights["encoder.conv_in.bias"]
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=r"lack encoder.conv_in.bias; download"):
        build_codec("sd-vae-ema", str(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.long(), "encoder.conv_in.bias is int64, not float32"),
        (lambda t: t * math.nan, "encoder.conv_in.bias is not finite"),
    ],
)
def test_weights_that_diffusers_would_cast_are_refused(folders, tmp_path, change, reason):
    random_autoencoder("scale").save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file(
        weights | {"encoder.conv_in.bias": change(weights["encoder.conv_in.bias"])},
        tmp_path / WEIGHTS,
    )
    with pytest.raises(UserError, match=f"{WEIGHTS} cannot be used: {reason}.*; download"):
        build_codec("sd-vae-ema", str(tmp_path))


def test_a_pointer_of_git_lfs_in_place_of_weights_is_named(tmp_path):
    random_autoencoder("scale").save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="a pointer of Git LFS, not the file; fetch it"):
        build_codec("diffusers", str(tmp_path))


def test_origin_tells_a_hubs_revision_and_a_folders_name(folders, hub):
    revision = hub("org/pipeline", random_autoencoder("dc"), "vae")
    found = build_codec("diffusers", "org/pipeline/vae", local_only=True)
    assert found.origin == {"id": "org/pipeline/vae", "revision": revision}
    assert found.identity == build_codec("diffusers", folders["dc"]).identity
    assert build_codec("diffusers", folders["dc"]).origin == {"id": "dc"}
    assert RecordedCodec.of(found, "diffusers").origin == found.origin


@pytest.mark.parametrize("local_only", [True, False])
@pytest.mark.parametrize("name", AUTOENCODERS)
def test_an_absent_autoencoder_gets_one_line_offline(hub, monkeypatch, name, local_only):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", not local_only)
    path = "org/name/vae" if name == "diffusers" else None
    with pytest.raises(UserError, match="not on this machine.*--codec.path") as error:
        build_codec(name, path, local_only=local_only)
    assert "\n" not in str(error.value)


def test_the_codec_diffusers_wants_a_path():
    with pytest.raises(UserError, match="codec diffusers needs the folder or hub id.*--codec.path"):
        build_codec("diffusers")


def cached(folder: str, name: str = "sd-vae-ema") -> tuple[TrainConfig, RecordedCodec]:
    """The configuration and codec of a run on a latent cache."""
    codec = RecordedCodec.of(build_codec(name, folder), name)
    return parse_train(["--codec.name", name, "--codec.path", "org/absent"])[0], codec


def test_previews_of_a_cache_are_decoded_by_its_codec_else_a_tiny_one_else_not(folders, hub):
    config, codec = cached(folders["scale"])
    assert TINY == {"sd-vae-ema": "taesd", "sd-vae-mse": "taesd"} and TINY.keys() < CODECS.keys()
    assert preview_codec(config, codec) is None
    hub("madebyollin/taesd", random_autoencoder("tiny"))
    assert preview_codec(config, codec).identity["name"] == "autoencoder_tiny"
    hub("org/absent", random_autoencoder("scale"))
    assert preview_codec(config, codec).identity == codec.identity
    # Another autoencoder at the path, so not of these latents.
    other = replace(config, codec=replace(config.codec, path=folders["shift"]))
    assert preview_codec(other, codec).identity["name"] == "autoencoder_tiny"


def test_a_tiny_codec_is_not_taken_for_latents_of_another_scale(folders, hub):
    hub("madebyollin/taesd", random_autoencoder("tiny"))
    assert preview_codec(*cached(folders["shift"])) is None
    assert preview_codec(*cached(folders["channels"])) is None
    assert preview_codec(*cached(folders["scale"], "diffusers")) is None


def test_a_preview_decoder_is_used_or_missed_in_one_line(folders, hub):
    config, codec = cached(folders["scale"])
    given = replace(config, preview=replace(config.preview, decoder=folders["tiny"]))
    assert preview_codec(given, codec).identity["name"] == "autoencoder_tiny"
    absent = replace(config, preview=replace(config.preview, decoder="org/none"))
    with pytest.raises(UserError, match="'org/none'.*grids: --preview.decoder"):
        preview_codec(absent, codec)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scaling_factor": 0},
        {"scaling_factor": math.nan},
        {"scaling_factor": None},
        {"scaling_factor": "0.18"},
        {"scaling_factor": [0.1] * 4},
        {"scaling_factor": 10**400},
        {"shift_factor": math.inf},
        {"shift_factor": True},
        {"shift_factor": ""},
        {"latents_mean": [10**400] * 4, "latents_std": [1.0] * 4},
        {"latents_mean": [0.1] * 4, "latents_std": [1.0] * 3},
        {"latents_mean": [0.1] * 2, "latents_std": [1.0] * 2},
        {"latents_mean": [0.1] * 4, "latents_std": [1.0, 0.0, 1.0, 1.0]},
        {"latents_mean": 0.1, "latents_std": 1.0},
        {"latents_mean": [], "latents_std": []},
    ],
)
def test_a_configuration_that_cannot_normalise_is_refused(wrong, tmp_path):
    vae = random_autoencoder("scale")
    vae.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match=r"config.json scales by .*for 4 channels.*download"):
        build_codec("diffusers", str(tmp_path))


def test_pickled_weights_alone_are_refused_in_one_line(tmp_path, caplog):
    vae = random_autoencoder("scale")
    vae.save_pretrained(tmp_path)
    torch.save(vae.state_dict(), tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"no file named {WEIGHTS}"):
        build_codec("diffusers", str(tmp_path))
    assert not caplog.records


def test_scale_and_shift_may_be_given(folders, tmp_path):
    own = build_codec("diffusers", folders["scale"])
    given = build_codec("diffusers", folders["scale"], scale=0.5, shift=2.0)
    moments = own.moments(torch.rand(2, 3, 8, 8))
    mean = moments.chunk(2, dim=1)[0]
    torch.testing.assert_close(
        given.latents(moments, torch.full_like(mean, 0)).mean(), 0.5 * (mean - 2).mean()
    )
    assert given.identity == own.identity | {"scale": 0.5, "shift": 2.0}
    config = CodecConfig("diffusers", folders["scale"], scale=0.5, shift=2.0)
    recorded = RecordedCodec.of(own, "diffusers").normalised_by(config)
    assert recorded.identity == given.identity == configured_codec(config).identity
    given.vae.save_pretrained(tmp_path)  # as an export writes it
    assert build_codec("diffusers", str(tmp_path)).identity == given.identity


@pytest.mark.parametrize("sort", ["channels", "dc"])
def test_a_shift_that_would_be_lost_is_refused(folders, sort):
    codec = build_codec("diffusers", folders[sort])
    with pytest.raises(UserError, match="codec.shift 2.0 has no effect"):
        build_codec("diffusers", folders[sort], shift=2.0)
    if sort == "channels":
        with pytest.raises(UserError, match="have no effect on a latent cache whose codec"):
            RecordedCodec.of(codec, "x").normalised_by(CodecConfig(scale=2.0))


@pytest.mark.parametrize("option", ["path", "scale", "shift"])
def test_identity_takes_no_options(option):
    with pytest.raises(UserError, match=f"codec.{option} 2 has no effect on codec identity"):
        build_codec("identity", **{option: 2})
