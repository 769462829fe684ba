"""What a codec keeps of an image: similarities against closed forms and libraries, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run_here
from PIL import Image

from sit_vit5.codecs import build_codec
from sit_vit5.config import CodecConfig, ReconstructionConfig
from sit_vit5.data.transforms import center_crop
from sit_vit5.evaluation.reconstruction import reconstruct, round_trip
from sit_vit5.metrics.fid import frechet_distance
from sit_vit5.metrics.similarity import Unavailable, find_backbone, load_backbone, lpips, psnr, ssim
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.distributed import Processes, alone
from sit_vit5.utils.errors import UserError

CPU = torch.device("cpu")
ALONE = alone()
RNG = np.random.default_rng(0)


def options(data: object, vae: Path | None = None, **changes) -> ReconstructionConfig:
    codec = CodecConfig("identity") if vae is None else CodecConfig("diffusers", str(vae))
    chosen = {"image_size": 8, "features": "pixels", "workers": 0, "out": "x", **changes}
    return ReconstructionConfig(data=str(data), codec=codec, **chosen)


def flat(value: int, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.uint8)


def test_psnr_of_a_constant_error_is_the_closed_form():
    found = psnr(
        flat(100, 2, 4, 4, 3), np.concatenate([flat(90, 1, 4, 4, 3), flat(100, 1, 4, 4, 3)])
    )
    assert found[0] == pytest.approx(20 * math.log10(25.5), rel=1e-12)
    assert math.isinf(found[1])


def test_ssim_of_flat_images_is_the_closed_form_and_falls_with_noise():
    pytest.importorskip("torchmetrics")
    measure = ssim((16, 12, 3), CPU)
    c1 = (0.01 * 255) ** 2
    expected = (2 * 50 * 200 + c1) / (50**2 + 200**2 + c1)  # no variance: only the means count
    assert measure(flat(50, 1, 16, 12, 3), flat(200, 1, 16, 12, 3))[0] == pytest.approx(expected)
    image = RNG.integers(50, 200, (1, 16, 12, 3)).astype(np.uint8)
    noisy = [image + RNG.integers(0, level, image.shape).astype(np.uint8) for level in (1, 9, 50)]
    values = [measure(image, other)[0] for other in noisy]
    assert values[0] == pytest.approx(1) and values[0] > values[1] > values[2]
    with pytest.raises(Unavailable, match="images of 11 pixels or more"):
        ssim((8, 8, 1), CPU)


@pytest.fixture
def squeezenet_file(tmp_path, monkeypatch) -> Path:
    """Random weights where torch's cache would hold torchvision's: 5 MB, AlexNet has 240."""
    from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / SqueezeNet1_1_Weights.IMAGENET1K_V1.url.split("/")[-1]
    path.parent.mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(squeezenet1_1().state_dict(), path)
    return path


@pytest.mark.filterwarnings("ignore")
def test_lpips_equals_the_library_with_its_weights_in_the_cache_or_given(squeezenet_file, tmp_path):
    library = pytest.importorskip("lpips")
    pair = [RNG.integers(0, 256, (2, 64, 64, 3)).astype(np.uint8) for _ in range(2)]
    tensors = [torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1 for images in pair]
    with torch.no_grad():
        expected = library.LPIPS(net="squeeze", verbose=False)(*tensors).flatten().numpy()
    for weights in (None, str(squeezenet_file)):
        measure = lpips((64, 64, 3), CPU, network="squeeze", weights=weights)
        np.testing.assert_allclose(measure(*pair), expected, rtol=1e-6)
        assert (measure(pair[0], pair[0]) == 0).all()
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="other.pth is not torchvision's squeeze weights file"):
        lpips((64, 64, 3), CPU, network="squeeze", weights=str(tmp_path / "other.pth"))
    with pytest.raises(Unavailable, match="images of 64 pixels or more"):
        lpips((32, 32, 3), CPU, network="squeeze", weights=None)


def test_a_pointer_in_place_of_lpips_weights_is_named(tmp_path):
    (tmp_path / "x.pth").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="x.pth cannot be read: it is a pointer of Git LFS"):
        load_backbone(torch.nn.Sequential(), tmp_path / "x.pth", "alex")


def test_missing_lpips_weights_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="download https://.*alexnet.*--lpips-weights FILE"):
        find_backbone("alex", None)
    with pytest.raises(UserError, match="no.pth does not exist; download https://.*vgg16"):
        find_backbone("vgg", str(tmp_path / "no.pth"))


def test_the_identity_codec_loses_nothing():
    result, shown = reconstruct(options("digits", columns=5), ALONE)
    assert result["frechet_distance"] == 0 and result["count"] == 360
    assert result["psnr"] == {"mean": None, "error": None}
    assert any("360 images come back exactly" in note for note in result["notes"])
    assert len(shown) == 5 and all((original == found).all() for original, found in shown)


def test_a_codec_is_compared_with_the_cropped_originals(image_folder, tiny_vae):
    chosen = options(image_folder, tiny_vae, batch_size=7)
    result, _ = reconstruct(chosen, ALONE)
    files = sorted(image_folder.rglob("*.png"))
    originals = np.stack([center_crop(Image.open(file), 8) for file in files])
    found = round_trip(
        build_codec("diffusers", str(tiny_vae)), originals, np.arange(24), chosen, CPU
    )
    a, b = (Statistics.of(images.reshape(24, -1) / 255) for images in (originals, found))
    expected = frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    assert result["frechet_distance"] == pytest.approx(expected, rel=1e-6) and expected > 1
    error = np.square(originals.astype(float) - found).mean((1, 2, 3))
    assert result["psnr"]["mean"] == pytest.approx(np.mean(10 * np.log10(255**2 / error)), rel=1e-5)
    assert result["codec"]["origin"] == {"id": tiny_vae.name}
    assert result["name"] == "Frechet distance of pixels-24"


def test_draws_of_the_posterior_belong_to_the_image_not_to_the_batch(image_folder, tiny_vae):
    def distance(**changes) -> float:
        chosen = options(image_folder, tiny_vae, **changes)
        return reconstruct(chosen, ALONE)[0]["frechet_distance"]

    mode, drawn = distance(), distance(posterior="sample")
    assert abs(mode - drawn) > 1e-3 * mode
    assert distance(posterior="sample", batch_size=5) == pytest.approx(drawn, rel=1e-3)
    assert abs(distance(posterior="sample", seed=1) - drawn) > 1e-3 * drawn


def test_processes_share_the_images_and_find_the_same(monkeypatch, image_folder, tiny_vae):
    whole, _ = reconstruct(options(image_folder, tiny_vae), ALONE)
    others = []  # what the second process sends

    def gather(values: list, processes: Processes) -> list:
        if processes.rank == 1:
            others.extend(values)
        return values + others if processes.rank == 0 else values

    monkeypatch.setattr("sit_vit5.evaluation.reconstruction.gather", gather)
    for rank in (1, 0):
        processes = Processes(rank, 2, CPU, lambda: None)
        result, _ = reconstruct(options(image_folder, tiny_vae, batch_size=5), processes)
    assert result["count"] == 24
    assert result["frechet_distance"] == pytest.approx(whole["frechet_distance"], rel=1e-3)
    assert result["psnr"]["mean"] == pytest.approx(whole["psnr"]["mean"], rel=1e-4)


def test_the_command_writes_table_and_picture(image_folder, tiny_vae, tmp_path, capsys):
    run_here(
        "evaluate/reconstruction.py",
        "--data", image_folder, "--codec.name", "diffusers", "--codec.path", tiny_vae,
        "--image-size", 8, "--features", "pixels", "--workers", 0, "--columns", 3,
        "--out", tmp_path / "rec",
    )  # fmt: skip
    result = json.loads((tmp_path / "rec" / "reconstruction.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[3:5] == ["pixels-24", f"{result['frechet_distance']:.4f}"]
    assert lines[-2:] == [
        str(tmp_path / "rec" / f"reconstruction.{kind}") for kind in ("json", "png")
    ]
    with Image.open(lines[-1]) as picture:
        assert picture.width > 3 * 64 and picture.height > 3 * 64


def test_what_makes_no_sense_is_refused(image_folder, tiny_vae, tmp_path):
    np.savez(tmp_path / "ref.npz", mu=np.zeros(2), sigma=np.eye(2), arr_0=flat(0, 2, 8, 8, 3))
    cases = [
        (options(tmp_path / "ref.npz"), "is a reference for generated samples"),
        (options("digits", num_images=361), "num_images 361 must be at most 360, or 0"),
        (options("digits", tiny_vae), "the autoencoder encodes images of 3 channels, these have 1"),
        (options(image_folder, tiny_vae, image_size=9), "not divisible by the codec's factor 2"),
        (options(tmp_path / "absent"), "does not exist"),
    ]
    for chosen, message in cases:
        with pytest.raises(UserError, match=message):
            reconstruct(chosen, ALONE)
