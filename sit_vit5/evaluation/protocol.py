"""Comparability of a result with published values on ImageNet 256x256, and those values."""

from __future__ import annotations

from pathlib import Path

from sit_vit5.config import SDE_METHODS
from sit_vit5.report.published import (
    EARLY,
    IMAGE_SIZE,
    PUBLISHED_SAMPLES,
    Published,
    paper_name,
    published,
    rival,
)

SHAPE, CLASSES = (IMAGE_SIZE, IMAGE_SIZE, 3), 1000
LATENT_CHANNELS = 4  # of Stable Diffusion's autoencoder


def is_of_imagenet(result: dict) -> bool:
    """True for a result of Inception features on ImageNet at 256x256.

    Recognised by 1,000 class names in the manifest, or by the reference's name.
    """
    if result["extractor"]["features"] != "inception" or tuple(result["image_shape"]) != SHAPE:
        return False
    names = (result["manifest"] or {}).get("class_names", ())
    return len(names) == CLASSES or "imagenet" in Path(result["reference"]).name.lower()


def settings_of(result: dict) -> dict:
    """The settings in the samples' manifest, {} if there is none."""
    return (result["manifest"] or {}).get("settings") or {}


def guidance_of(result: dict) -> dict:
    """The guidance in the samples' manifest, {} if it is not known."""
    guidance = (settings_of(result).get("sampler") or {}).get("guidance")
    return guidance if isinstance(guidance, dict) else {}


def published_rows() -> tuple[Published, ...]:
    """All published values; of the curves those at 400k steps."""
    tables = published()
    early = (
        Published(paper_name(model), f"{EARLY // 1000}k steps", "none", curve[EARLY],
                  tables.curve_source)
        for model, curve in tables.curves.items()
    )  # fmt: skip
    return tables.values + tuple(early)


def published_curves(result: dict) -> dict[str, dict[int, float]]:
    """FID by step of the result's model and of the other backbone; {} if they do not apply.

    The curves are without guidance and of the named backbones on ImageNet 256x256.
    """
    model = settings_of(result).get("model")
    curves = published().curves
    if not is_of_imagenet(result) or model not in curves or guidance_of(result).get("scale") != 1:
        return {}
    return {name: dict(curves[name]) for name in (model, rival(model)) if name}


def differences(result: dict) -> list[str]:
    """Differences between a result and the protocol of the published values."""
    said = []
    if result["count"] != PUBLISHED_SAMPLES:
        said.append(
            f"{result['count']:,} samples instead of {PUBLISHED_SAMPLES:,}: fewer give a larger FID"
        )
    drawn = settings_of(result).get("labels")
    if drawn is None:
        said.append("how the labels were drawn is not known")
    elif drawn != "random":
        said.append(f"labels {drawn}: those of DiT, SiT and ViT-5 are drawn at random")
    if result["reference_count"] is None:
        said.append(
            f"the images behind the statistics of {Path(result['reference']).name} are not told: "
            "published values are against the whole training set"
        )
    elif result["reference_count"] < PUBLISHED_SAMPLES:
        said.append(
            f"a reference of {result['reference_count']:,} images instead of the training set's "
            "1,281,167"
        )
    return said + sampling_differences(result)


def sampling_differences(result: dict) -> list[str]:
    """Differences between the sampler of a SiT or ViT-5 and that of their published values."""
    settings, guidance = settings_of(result), guidance_of(result)
    sampler, model = settings.get("sampler") or {}, str(settings.get("model"))
    if not is_of_imagenet(result) or not model.startswith(("SiT", "ViT5")):
        return []
    said = []
    method, steps = sampler.get("method"), sampler.get("steps")
    if method not in (None, *SDE_METHODS):
        said.append(
            f"sampled by the ODE solver {method}: SiT's values are by its SDE, --method "
            "euler_maruyama; without guidance its weights give 8.3 by the SDE and 9.5 by an ODE "
            "(github.com/willisma/SiT, issue 31)"
        )
    elif isinstance(steps, int) and steps < 250:
        said.append(f"{steps} steps of the SDE: SiT's values are by 250")
    if guidance.get("scale", 1) != 1 and guidance.get("channels") in (None, LATENT_CHANNELS):
        said.append(
            "guided on all channels: SiT's code guides 3 of 4 (--guidance.channels 3), a weaker "
            "guidance at the same scale"
        )
    if settings.get("weights") == "raw":
        said.append("raw weights: published values are of averaged ones, decay 0.9999")
    return said


def protocol_notes(result: dict) -> list[str]:
    """Notes on the sampler's differences and the published value at this step."""
    notes, step = sampling_differences(result), settings_of(result).get("step")
    at_step = {
        name: curve[step] for name, curve in published_curves(result).items() if step in curve
    }
    if at_step:
        values = ", ".join(f"{paper_name(name)} {fid:g}" for name, fid in at_step.items())
        notes.append(
            f"published FID-50K without guidance at {step:,} steps: {values} "
            f"({published().curve_source}, read off it)"
        )
    return notes
