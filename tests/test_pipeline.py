"""The diffusers pipeline draws what our own commands draw, and survives its folder."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload_with_hook
from autoencoders import random_autoencoder
from diffusers import DiffusionPipeline
from helpers import ROOT, command_environment
from PIL import Image
from safetensors.torch import load_file, save_file

from sit_vit5.codecs import build_codec
from sit_vit5.commands import export as export_command
from sit_vit5.config import (
    CodecConfig,
    EmaConfig,
    GenerateConfig,
    GuidanceConfig,
    ObjectiveConfig,
    SamplerConfig,
    SdeConfig,
    TrainConfig,
)
from sit_vit5.config.presets import RECIPES, Backbone
from sit_vit5.interop import export
from sit_vit5.interop.diffusers import ViT5SiT
from sit_vit5.interop.pipeline import SiTPipeline
from sit_vit5.models.checkpoint import State, import_checkpoint, open_checkpoint
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.generate import generate
from sit_vit5.sampling.grid import draw_grid
from sit_vit5.sampling.load import load
from sit_vit5.utils.distributed import alone
from sit_vit5.utils.errors import UserError

NAMES = ("cat, house cat", "dog", "crane, bird", "crane, machine")


def denoiser(seed: int, *, channels: int, classes: int, timesteps: int = 0) -> Denoiser:
    """One block on 4x6 latents, with weights that make every path matter."""
    torch.manual_seed(seed)
    model = Denoiser(
        Backbone(16, 1, 2, patch_size=2, recipe=RECIPES["ViT5"]),
        in_channels=channels,
        input_size=(4, 6),
        num_classes=classes,
        out_channels=2 * channels if timesteps else None,
        timesteps=timesteps,
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


def write_checkpoint(
    folder: Path,
    *,
    vae: Path | None = None,
    codec_name: str = "sd-vae-ema",
    names: tuple[str, ...] = NAMES,
    objective: ObjectiveConfig = ObjectiveConfig(shift=1.5),
    timesteps: int = 0,
    seed: int = 0,
) -> Path:
    """A checkpoint of random weights, raw and averaged, as training leaves it."""
    codec = CodecConfig("identity") if vae is None else CodecConfig(codec_name, str(vae))
    channels = 1 if vae is None else 4
    raw, ema = (
        denoiser(2 * seed + place, channels=channels, classes=len(names), timesteps=timesteps)
        for place in range(2)
    )
    state = State(
        step=7, images_seen=70, skipped_steps=0, skipped_in_a_row=0, in_channels=channels,
        input_size=(4, 6), class_names=names, data={"source": "a|b"},
        codec=build_codec(codec.name, codec.path).identity, out_channels=raw.out_channels,
        timesteps=timesteps,
    )  # fmt: skip
    config = TrainConfig(
        model="ViT5-Nano/2", codec=codec, objective=objective, ema=EmaConfig((0.99,)),
        backbone=raw.backbone,
    )  # fmt: skip
    import_checkpoint(
        folder, state, config, averages={"ema_0.99": ema.state_dict()}, model=raw.state_dict()
    )
    return folder


def exported(checkpoint: Path, *options: str) -> Path:
    """The folder of `python -m sit_vit5 export`, made once."""
    target = checkpoint.with_name(checkpoint.name + "-diffusers")
    if not target.exists():
        export_command.main(["--checkpoint", str(checkpoint), "--to", str(target), *options])
    return target


def quiet(folder: Path, **options) -> SiTPipeline:
    pipeline = SiTPipeline.from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module", params=["pixels", "latents"])
def checkpoint(request, tmp_path_factory, tiny_vae) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    return write_checkpoint(folder, vae=tiny_vae if request.param == "latents" else None)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory) -> SiTPipeline:
    """A model of pixels."""
    return quiet(exported(write_checkpoint(tmp_path_factory.mktemp("pipe") / "checkpoint")))


@pytest.fixture(scope="module")
def unconditional(tmp_path_factory) -> SiTPipeline:
    folder = tmp_path_factory.mktemp("unconditional") / "checkpoint"
    return quiet(exported(write_checkpoint(folder, names=())))


def pixels(pipeline: SiTPipeline, *arguments, **options) -> np.ndarray:
    """The bytes that the pictures hold, uint8 (N, H, W, C)."""
    images = np.stack([np.array(image) for image in pipeline(*arguments, **options).images])
    return images[..., None] if images.ndim == 3 else images


@pytest.mark.parametrize("method", ["heun", "euler_maruyama"])
def test_chosen_images_are_those_of_the_set_to_the_bit(checkpoint, tmp_path, method):
    chosen = dict(num_samples=23, steps=3, batch_size=8, method=method, seed=3)
    chosen["guidance"] = GuidanceConfig(1.5)

    def made(name: str, **changes) -> tuple[np.ndarray, dict]:
        folder = tmp_path / name
        generate(GenerateConfig(str(checkpoint), out=str(folder), **chosen | changes), alone())
        manifest = json.loads((folder / "samples.json").read_text())
        return np.load(folder / "samples.npz")["arr_0"], manifest

    whole, manifest = made("whole")
    some, facts = made("some", indices=(22, 3, 4, 17), png=True)
    assert (some == whole[[22, 3, 4, 17]]).all()
    assert facts["labels"] == [manifest["labels"][n] for n in (22, 3, 4, 17)]
    assert facts["settings"]["indices"] == [22, 3, 4, 17]
    files = sorted((tmp_path / "some" / "images").iterdir())
    assert [file.name for file in files] == [f"{n:06d}.png" for n in (3, 4, 17, 22)]
    assert (np.asarray(Image.open(files[3])).reshape(some[0].shape) == whole[22]).all()
    larger, _ = made("larger", indices=(3,), num_samples=100)
    assert (larger == whole[[3]]).all()

    pipeline = quiet(exported(checkpoint))
    options = dict(steps=3, batch_size=8, method=method, seed=3, guidance_scale=1.5)
    labels = manifest["labels"]
    assert (pixels(pipeline, [labels[17], labels[2]], indices=[17, 2], **options)
            == whole[[17, 2]]).all()  # fmt: skip
    every = pixels(pipeline, labels, **options)
    assert (pixels(pipeline, labels, indices=[22, 2], **options) == every[[22, 2]]).all()
    latents = pipeline(labels, indices=[2], output_type="latent", **options).images
    assert len(latents) == 1


@pytest.mark.parametrize(
    ("labels", "indices", "message"),
    [
        ([0, 1, 2], [3], "indices 3 must be below 3, the number of images"),
        ([0, 1], [1, 2, 3], "indices name 3 images for 2 labels; give one for each"),
        ([0], [], "must be numbers of images, 0 or above"),
        ([0], [-1], "must be numbers of images, 0 or above"),
        ([0], [1.5], "must be numbers of images, 0 or above"),
    ],
)
def test_indices_of_no_image_are_refused(pipe, labels, indices, message):
    with pytest.raises(UserError, match=message):
        pipe(labels, indices=indices, steps=1)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "heun", "steps": 3},
        {"method": "ab2", "steps": 3, "shift": 3.0},
        {"method": "dopri5", "rtol": 0.1, "atol": 0.1},
        {"method": "euler_maruyama", "steps": 4, "sde": SdeConfig("constant", 0.5, "tweedie")},
    ],
    ids=lambda options: options["method"],
)
def test_images_are_to_the_byte_those_of_the_sampling_commands(checkpoint, options):
    labels, common = [0, 3, 2, 2, 1], {"seed": 5, "batch_size": 2} | options
    guidance = GuidanceConfig(1.7, 1, (0.1, 0.9), "t", "linear")
    loaded = load(SamplerConfig(str(checkpoint), **common, guidance=guidance), torch.device("cpu"))
    expected = [
        loaded.generator(range(start, start + len(part)), part).pixels.numpy()
        for start, part in ((0, [0, 3]), (2, [2, 2]), (4, [1]))
    ]
    drawn = pixels(
        quiet(exported(checkpoint)), labels, guidance_scale=1.7, guidance_channels=1,
        guidance_interval=(0.1, 0.9), guidance_schedule="linear", **common,
    )  # fmt: skip
    assert len(np.unique(drawn)) > 20
    assert np.array_equal(drawn, np.concatenate(expected))


def test_a_tiny_autoencoder_is_exported_like_another(tmp_path):
    random_autoencoder("tiny").save_pretrained(tmp_path / "vae")
    folder = write_checkpoint(tmp_path / "a", vae=tmp_path / "vae", codec_name="taesd")
    options = SamplerConfig(str(folder), steps=2, guidance=GuidanceConfig(1.5))
    expected = load(options, torch.device("cpu")).generator(range(1), [2]).pixels.numpy()
    drawn = pixels(quiet(exported(folder)), 2, steps=2, guidance_scale=1.5)
    assert np.array_equal(drawn, expected) and drawn.shape == (1, 16, 24, 3)


def test_the_picture_of_the_grid_command_holds_these_images(checkpoint, tmp_path):
    out = tmp_path / "grid.png"
    main = runpy.run_path(str(ROOT / "sample" / "grid.py"))["main"]
    options = "--columns 2 --steps 2 --seed 3 --classes 1 2 --guidance.scale 1.5".split()
    main(["--checkpoint", str(checkpoint), "--out", str(out), *options])
    drawn = pixels(
        quiet(exported(checkpoint)), [1, 2], num_images=2, guidance_scale=1.5, steps=2, seed=3
    )
    grid = draw_grid({"step 7, ema, guidance 1.5": drawn}, NAMES[1:3], 2)
    assert np.array_equal(np.array(Image.open(out)), np.array(grid))


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_the_folder_loads_in_both_ways_and_saves_itself_again(
    checkpoint, tmp_path, low_cpu_mem_usage
):
    first = quiet(exported(checkpoint), low_cpu_mem_usage=low_cpu_mem_usage)
    first.save_pretrained(tmp_path)
    again = quiet(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    weights = open_checkpoint(checkpoint).weights("ema")
    assert all(torch.equal(weights[k], t) for k, t in again.transformer.state_dict().items())
    assert again.class_names == NAMES and again.objective == ObjectiveConfig(shift=1.5)
    assert (again.vae is None) == (first.transformer.in_channels == 1)
    assert np.array_equal(pixels(first, 1, steps=2), pixels(again, "dog", steps=2))
    assert set(again.components) == {"transformer", "vae"}


def test_classes_go_by_name_part_of_a_name_and_number(pipe):
    wanted = ["dog", 0, "house cat", "cat, house cat", "machine", np.int64(2), "3"]
    assert pipe.get_label_ids(wanted) == [1, 0, 0, 0, 3, 2, 3]
    assert pipe.get_label_ids("bird") == [2] and pipe.get_label_ids(torch.tensor([1])) == [1]
    assert len(pipe("dog", num_images=3, steps=1).images) == 3


OPTIONS = [
    dict(seed=1), dict(steps=3), dict(method="euler"), dict(shift=3.0), dict(guidance_scale=3.0),
    dict(guidance_interval=(0.5, 1.0)), dict(guidance_schedule="cosine"),
    dict(guidance_interval=(0, 0), guidance_interval_unit="step"), dict(precision="bf16"),
    dict(latents=torch.ones(1, 1, 4, 6)), dict(generator=torch.Generator().manual_seed(0)),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_every_option_changes_the_latents(pipe, options):
    plain = {"steps": 2, "guidance_scale": 2.0, "output_type": "latent"}
    first, second = (pipe("dog", **plain | changed).images for changed in ({}, options))
    assert not torch.equal(first, second)


def test_output_types_agree_and_latents_are_ordinary_tensors(checkpoint):
    pipeline, size = quiet(exported(checkpoint)), (4, 6)
    made = {kind: pipeline([1, 2], steps=2, output_type=kind).images for kind in ("np", "pt")}
    drawn = pixels(pipeline, [1, 2], steps=2)
    assert made["np"].dtype == np.float32 and np.array_equal(np.rint(made["np"] * 255), drawn)
    assert np.array_equal(made["pt"].permute(0, 2, 3, 1).numpy(), made["np"])
    (latents,) = pipeline([1, 2], steps=2, output_type="latent", return_dict=False)
    assert latents.shape == (2, pipeline.transformer.in_channels, *size)
    assert not latents.is_inference()


def test_a_generator_is_advanced_and_reproduces(pipe):
    generator = torch.Generator().manual_seed(4)
    first, second = (pixels(pipe, "dog", steps=1, generator=generator) for _ in range(2))
    again = pixels(pipe, "dog", steps=1, generator=generator.manual_seed(4))
    assert np.array_equal(first, again) and not np.array_equal(first, second)


def test_an_unconditional_model_draws_a_number_of_images(unconditional):
    drawn = pixels(unconditional, num_images=3, steps=2)
    assert drawn.shape == (3, 4, 6, 1)
    assert len(np.unique(drawn.reshape(3, -1), axis=0)) == 3
    assert "num_images=1" in (Path(unconditional.source) / "README.md").read_text()


def test_a_worse_model_guides_as_in_the_commands(pipe, tmp_path):
    ours = Path(pipe.source).with_name("checkpoint")
    worse = write_checkpoint(tmp_path / "worse", seed=1)
    guidance = GuidanceConfig(2.0, reference=str(worse))
    loaded = load(SamplerConfig(str(ours), steps=2, guidance=guidance), torch.device("cpu"))
    other = quiet(exported(worse))
    drawn = pixels(pipe, [1], steps=2, guidance_scale=2, guidance_reference=other)
    assert np.array_equal(drawn, loaded.generator([0], [1]).pixels.numpy())
    assert not np.array_equal(drawn, pixels(pipe, [1], steps=2, guidance_scale=2))
    with pytest.raises(UserError, match=r"needs guidance\.scale"):
        pipe(1, guidance_reference=other)


WRONG = [
    (dict(class_labels="horse"), "class 'horse' is no class name or number"),
    (dict(class_labels="crane"), "class 'crane' may be any of 2, 3; give the number"),
    (dict(class_labels=4), "label 4 is not in 0..3"),
    (dict(class_labels=[-1]), "label -1 is not in 0..3"),
    (dict(class_labels=[]), "class_labels is empty"),
    (dict(), "class_labels is missing: give names or numbers 0..3"),
    (dict(class_labels=1, num_images=0), "num_images 0 must be at least 1"),
    (dict(class_labels=1, output_type="jpg"), "unknown output_type 'jpg'; nearest: pil, np, pt"),
    (dict(class_labels=1, output_type=None), "unknown output_type None"),
    (dict(class_labels=1, method="hen"), "unknown method 'hen'; nearest: heun"),
    (dict(class_labels=1, method="dopri5", steps=3), "steps 3 has no effect: dopri5 chooses"),
    (dict(class_labels=1, rtol=1e-3), "rtol 0.001 has no effect: heun has a fixed grid"),
    (dict(class_labels=1, sde=SdeConfig(norm=2)), "sde options have no effect on heun"),
    (dict(class_labels=1, batch_size=0), "batch_size 0 must be at least 1"),
    (dict(class_labels=1, guidance_interval=(1, 0)), "guidance.interval 1 0 is upside down"),
    (dict(class_labels=1, guidance_schedule="sine"), "guidance.schedule 'sine'; nearest: cosine"),
    (
        dict(class_labels=1, guidance_scale=2.0, guidance_channels=2),
        "guidance.channels 2 must be at most 1",
    ),
    (dict(class_labels=1, latents=torch.ones(1, 1, 4, 4)), "must have the shape (1, 1, 4, 6)"),
    (dict(class_labels=1, seed=0, generator=torch.Generator()), "give seed or generator, not"),
    (dict(class_labels=1, generator=[torch.Generator()]), "must be one torch.Generator"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda part: str(part)[:40])
def test_wrong_calls_get_one_line(pipe, options, message):
    with pytest.raises(UserError) as error:
        pipe(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_models_refuse_what_they_cannot_do(unconditional, tmp_path, tiny_vae):
    with pytest.raises(UserError, match=r"guidance\.scale 2 is impossible.*has no classes; use 1"):
        unconditional(guidance_scale=2)
    with pytest.raises(UserError, match="unconditional: give num_images, not class_labels"):
        unconditional(class_labels=1)
    never_null = ObjectiveConfig(class_dropout=0)
    folder = exported(write_checkpoint(tmp_path / "a", vae=tiny_vae, objective=never_null))
    assert "guidance_scale" not in (folder / "README.md").read_text()
    with pytest.raises(UserError, match="was trained with class_dropout 0; use 1"):
        quiet(folder)(1, guidance_scale=2)
    without_vae = quiet(folder, vae=None)
    assert without_vae(1, steps=1, output_type="latent").images.shape == (1, 4, 4, 6)
    with pytest.raises(UserError, match="without its vae the model makes latents only"):
        without_vae(1, steps=1)
    with pytest.raises(UserError, match=r"transformer is in torch.bfloat16; load it in fp32"):
        quiet(folder).to(torch.bfloat16)(1)
    transformer, vae = ViT5SiT.from_denoiser(denoiser(0, channels=1, classes=2)), quiet(folder).vae
    for wrong, message in (
        (dict(vae=vae), "the vae has 4 latent channels, the transformer 1"),
        (dict(id2label={"0": "a", "2": "b"}), "id2label must name the labels 0..1"),
        (dict(prediction="x0"), "unknown prediction 'x0'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            SiTPipeline(transformer, **wrong)
    assert SiTPipeline(transformer).class_names == ("0", "1")


def edited(file: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        facts = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps({k: v for k, v in facts.items() if v != "GONE"}))

    return edit


def reweighted(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return edit


INDEX, CARD = "model_index.json", "transformer/config.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DAMAGES = {
    "id2label: Input should be an object": edited(INDEX, id2label=["a"] * 4),
    "id2label.0: Input should be a valid string": edited(INDEX, id2label={"0": 1}),
    "id2label must name the labels 0..3": edited(INDEX, id2label={"a": "b"}),
    "shift: Input should be a valid number": edited(INDEX, shift="x"),
    "class_dropout: Input should be": edited(INDEX, class_dropout=None),
    "prediction: Input should be": edited(INDEX, prediction=["velocity"]),
    "transformer: Field required": edited(INDEX, transformer="GONE"),
    "transformer is a UNet2DModel": edited(INDEX, transformer=["diffusers", "UNet2DModel"]),
    "model_index.json cannot be read: maximum rec": lambda f: (f / INDEX).write_text("[" * 10**5),
    "config.json cannot be read: Input should be": lambda f: (f / CARD).write_text("[]"),
    "in_channels: Input should be greater": edited(CARD, in_channels=-1),
    "input_size: Input should be a valid array": edited(CARD, input_size=10**9),
    "num_classes: Input should be a valid int": edited(CARD, num_classes=None),
    "out_channels: Input should be greater": edited(CARD, out_channels=-1),
    "timesteps: Input should be a valid int": edited(CARD, timesteps="x"),
    "backbone: Input should be an object": edited(CARD, backbone="GONE"),
    "1 missing (final.bias)": reweighted(lambda weights: weights.pop("final.bias")),
    "1 unexpected (x)": reweighted(lambda weights: weights.update(x=torch.ones(1))),
    "final.bias is not finite": reweighted(lambda weights: weights["final.bias"].fill_(math.nan)),
    "final.bias is bool": reweighted(lambda w: w.update({"final.bias": w["final.bias"].bool()})),
    "it is a pointer of Git LFS": lambda f: (f / WEIGHTS).write_text("version https://git-lfs"),
}


@pytest.mark.parametrize("message", DAMAGES)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_folder_is_refused_in_one_line(pipe, tmp_path, message):
    folder = tmp_path / "folder"
    shutil.copytree(pipe.source, folder)
    DAMAGES[message](folder)
    with pytest.raises(UserError) as error:
        SiTPipeline.from_pretrained(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_vae_without_a_tensor_is_not_left_random(tmp_path, tiny_vae):
    folder = exported(write_checkpoint(tmp_path / "a", vae=tiny_vae))
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["decoder.conv_out.bias"]
    save_file(weights, file)
    with pytest.raises(UserError, match="vae lacks decoder.conv_out.bias; export"):
        SiTPipeline.from_pretrained(folder)


def test_steps_have_diffusers_name_too(pipe):
    drawn = pixels(pipe, "dog", num_inference_steps=3)
    assert np.array_equal(drawn, pixels(pipe, "dog", steps=3))
    assert not np.array_equal(drawn, pixels(pipe, "dog", steps=2))
    with pytest.raises(UserError, match="give one of them"):
        pipe("dog", steps=3, num_inference_steps=3)


def test_an_offloaded_network_is_moved_before_the_noise(tmp_path):
    """As `enable_model_cpu_offload`, which needs an accelerator, prepares the networks."""
    pipeline = quiet(exported(write_checkpoint(tmp_path / "checkpoint")))
    before = pixels(pipeline, "dog", steps=2)
    assert pipeline.model_cpu_offload_seq == "transformer->vae"
    _, hook = cpu_offload_with_hook(pipeline.transformer, "cpu")
    moved = []
    pre_forward = hook.hook.pre_forward
    hook.hook.pre_forward = lambda *a, **k: moved.append(len(a)) or pre_forward(*a, **k)
    assert np.array_equal(pixels(pipeline, "dog", steps=2), before)
    assert moved[0] == 1  # before the first call, whose hook sees its arguments too


def test_an_imported_dit_is_exported_whole(tmp_path, tiny_vae):
    objective = ObjectiveConfig(interpolant="vp", prediction="noise")
    dit = write_checkpoint(tmp_path / "dit", vae=tiny_vae, objective=objective, timesteps=1000)
    loaded = load(SamplerConfig(str(dit), steps=2), torch.device("cpu"))
    drawn = pixels(quiet(exported(dit)), 1, steps=2)
    assert np.array_equal(drawn, loaded.generator([0], [1]).pixels.numpy())


def test_the_exported_file_is_the_chosen_weights_alone(checkpoint, tmp_path):
    for weights, card in (("raw", "raw"), ("ema", "moving average, decay 0.99")):
        to = tmp_path / weights
        options = ["--weights", weights, "--license", "mit"]
        export_command.main(["--checkpoint", str(checkpoint), "--to", str(to), *options])
        (file,) = (to / "transformer").glob("*.safetensors")
        assert file.name == "diffusion_pytorch_model.safetensors"
        stored, ours = load_file(file), open_checkpoint(checkpoint).weights(weights)
        assert stored.keys() == ours.keys()
        assert all(torch.equal(stored[name], ours[name]) for name in ours)
        text = (to / "README.md").read_text()
        assert f"| weights | {card} |" in text and "license: mit" in text
        assert r"| data | source a\|b |" in text and "7, 70 images seen" in text
        assert "library_name: diffusers" in text
    index = json.loads((to / "model_index.json").read_text())
    assert index["_class_name"] == "SiTPipeline" and index["shift"] == 1.5
    if (to / "vae").exists():
        assert str(tmp_path.anchor) not in (to / "vae" / "config.json").read_text()


def test_imagenets_ids_get_their_words():
    names = export.readable_names(("n02099601", "n02123045"))
    assert names == ("n02099601, golden retriever", "n02123045, tabby, tabby cat")
    assert export.readable_names(("n02099601", "dog")) == ("n02099601", "dog")


def test_the_cards_snippet_runs_and_diffusers_own_class_finds_the_pipeline(checkpoint, tmp_path):
    folder = exported(checkpoint)
    assert str(folder.parent) not in (folder / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    snippet = snippet.replace('"."', repr(str(folder)))
    code = (
        f"{snippet}\n"
        "from diffusers import DiffusionPipeline\n"
        f"found = DiffusionPipeline.from_pretrained({str(folder)!r}, custom_pipeline='pipeline', "
        "trust_remote_code=True)\n"
        "assert type(found) is SiTPipeline\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=command_environment() | {"HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Expected types" not in ran.stderr and "will be ignored" not in ran.stderr
    assert Image.open(tmp_path / "sample.png").size in ((6, 4), (12, 8))
    with pytest.raises(AttributeError, match="has no attribute SiTPipeline"):
        DiffusionPipeline.from_pretrained(folder)  # diffusers knows its own classes only


def test_export_writes_all_or_nothing_and_refuses_in_one_line(checkpoint, tmp_path, monkeypatch):
    def main(*options: str) -> None:
        export_command.main(
            ["--checkpoint", str(checkpoint), "--to", str(tmp_path / "out"), *options]
        )

    for options, message in (
        (["--weights", "ema_0.5"], r"weights 'ema_0.5' are not in"),
        (["--checkpoint=absent"], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            main(*options)
    with pytest.raises(UserError, match="exists; choose another folder"):
        export_command.main(["--checkpoint", str(checkpoint), "--to", str(tmp_path)])
    monkeypatch.setattr(export_command, "FINDER_FILE", "x" * 300)
    with pytest.raises((UserError, OSError), match="File name too long"):
        main()
    assert list(tmp_path.iterdir()) == []


def test_exports_help_imports_no_torch():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['sit_vit5', 'export', '--help']\n"
        "try:\n"
        "    runpy.run_module('sit_vit5', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert all(option in shown.stdout for option in ("--checkpoint", "--to", "--weights", "ema"))
