"""A checkpoint as diffusers' folder: `python -m sit_vit5 export --checkpoint RUN --to DIR`.

    model_index.json  transformer/  vae/ (a model of latents)  README.md  pipeline.py

transformer/diffusion_pytorch_model.safetensors holds the chosen weights and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from sit_vit5 import __version__
from sit_vit5.config import ExportConfig
from sit_vit5.config.presets import model_name

if TYPE_CHECKING:
    from sit_vit5.interop.pipeline import SiTPipeline
    from sit_vit5.models.checkpoint import Checkpoint


CARD = "README.md"
# For `DiffusionPipeline.from_pretrained(DIR, custom_pipeline="pipeline", trust_remote_code=True)`:
# diffusers looks up other classes than its own in files only.
FINDER_FILE = "pipeline.py"
FINDER = "from sit_vit5 import SiTPipeline  # noqa: F401\n"


def build_pipeline(checkpoint: Checkpoint, options: ExportConfig) -> SiTPipeline:
    """The checkpoint's network, autoencoder, classes and objective as a pipeline."""
    from sit_vit5.codecs.autoencoder import AutoencoderCodec
    from sit_vit5.interop.diffusers import ViT5SiT
    from sit_vit5.interop.pipeline import SiTPipeline
    from sit_vit5.sampling.load import open_codec

    codec = open_codec(checkpoint, options.codec_path)
    vae = codec.vae if isinstance(codec, AutoencoderCodec) else None
    if vae is not None:
        vae.register_to_config(_name_or_path=None)  # a path on this machine
    objective = checkpoint.config.objective
    return SiTPipeline(
        ViT5SiT.from_denoiser(checkpoint.denoiser(options.weights)).eval(),
        vae,
        dict(enumerate(readable_names(checkpoint.state.class_names))),
        objective.interpolant,
        objective.prediction,
        objective.shift,
        objective.class_dropout,
    )


def readable_names(class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Class names, ImageNet's WordNet ids with their words: "n02099601, golden retriever"."""
    from timm.data import ImageNetInfo

    known = ImageNetInfo()
    if not class_names or not set(class_names) <= set(known.label_names()):
        return class_names
    return tuple(f"{name}, {known.label_name_to_description(name)}" for name in class_names)


def model_card(checkpoint: Checkpoint, pipeline: SiTPipeline, options: ExportConfig) -> str:
    """README.md: a header for the Hub, facts of the checkpoint, and how to draw an image."""
    name = model_name(checkpoint.config.backbone) or f"{checkpoint.config.model} (changed)"
    header = {
        "library_name": "diffusers",
        "pipeline_tag": "unconditional-image-generation",  # the Hub has no tag for classes
        "license": options.license,
        "tags": ["sit_vit5", "flow-matching"],
    }
    count = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    facts = {"model": name, "parameters": f"{count:,}"} | _facts(checkpoint, options.weights)
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {name}

A flow-matching image generator, trained or imported by `sit_vit5` {__version__}.

| | |
|---|---|
{table}

With `sit_vit5` installed:

```python
from sit_vit5 import SiTPipeline

pipe = SiTPipeline.from_pretrained(".")  # the path of this folder, or its id on the Hub
pipe({_example_call(checkpoint)}).images[0].save("sample.png")
```

Or `DiffusionPipeline.from_pretrained(FOLDER, custom_pipeline="pipeline", trust_remote_code=True)`.
`transformer/diffusion_pytorch_model.safetensors` holds the weights above and nothing else.
"""


def _facts(checkpoint: Checkpoint, weights: str) -> dict[str, str]:
    """What the checkpoint knows of itself, as cells of a Markdown table."""
    state, objective = checkpoint.state, checkpoint.config.objective
    kind, _, number = checkpoint.weights_name(weights).removeprefix("ema_").rpartition("_")
    images = f", {state.images_seen:,} images seen" if state.images_seen else ""
    sides = " x ".join(map(str, (*state.input_size, state.in_channels)))
    facts = {
        "weights": "raw" if number == "raw" else f"moving average, {kind or 'decay'} {number}",
        "training steps": f"{state.step:,}{images}",
        "data": ", ".join(f"{key} {value}" for key, value in state.data.items()),
        "classes": f"{len(state.class_names):,}" if state.class_names else "none (unconditional)",
        "objective": f"path {objective.interpolant}, prediction {objective.prediction}, "
        f"shift {objective.shift:g}, class dropout {objective.class_dropout:g}",
        "latents": f"{sides}, codec {checkpoint.config.codec.name}",
    }
    return {key: value.replace("|", "\\|") for key, value in facts.items()}


def _example_call(checkpoint: Checkpoint) -> str:
    """Arguments with which the model draws something."""
    names = readable_names(checkpoint.state.class_names)
    if not names:
        return "num_images=1, steps=50, seed=0"
    guided = checkpoint.config.objective.class_dropout > 0
    scale = "guidance_scale=1.5, " if guided else ""
    return f"class_labels=[{names[len(names) // 2]!r}], {scale}steps=50, seed=0"
