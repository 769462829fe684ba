"""A trained model as diffusers' pipeline: `SiTPipeline.from_pretrained(DIR)`, then call it.

`python -m sit_vit5 export` writes DIR. Image i of a call is image i of `sample/grid.py` with the
same weights, labels, seed and settings: it is made by the same `Generator`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderTiny,
    DiffusionPipeline,
    ImagePipelineOutput,
)
from PIL import Image
from torch import Tensor

from sit_vit5.codecs.autoencoder import AutoencoderCodec
from sit_vit5.codecs.identity import IdentityCodec
from sit_vit5.config import GuidanceConfig, ObjectiveConfig, SamplerConfig, SdeConfig
from sit_vit5.config.fields import check_values
from sit_vit5.flow.predictions import Flow
from sit_vit5.interop.diffusers import REMEDY, ViT5SiT
from sit_vit5.models.denoiser import check_labels
from sit_vit5.sampling.generator import Generator, find_classes
from sit_vit5.sampling.load import check_reference, resolve
from sit_vit5.utils.errors import UserError, choose, listed
from sit_vit5.utils.files import parse_json, read_json
from sit_vit5.utils.precision import set_precision, tf32_off
from sit_vit5.utils.tensors import read_diffusers

INDEX_FILE = "model_index.json"


def to_pil(pixels: Tensor) -> list[Image.Image]:
    """Pictures of uint8 (B, H, W, C), C 1 or 3."""
    return [Image.fromarray(image.squeeze(-1).numpy()) for image in pixels]


# What a call returns, from uint8 (B, H, W, C); `latent` from (B, C, h, w), near unit scale.
OUTPUT_TYPES: dict[str, Callable[[Tensor], object]] = {
    "pil": to_pil,
    "np": lambda pixels: (pixels.float() / 255).numpy(),
    "pt": lambda pixels: pixels.permute(0, 3, 1, 2).float() / 255,
    "latent": Tensor.clone,  # outside inference mode: a tensor like any other
}


@dataclass(frozen=True)
class _Settings:
    """The values in `model_index.json` that are no components."""

    id2label: dict[str, str] | None = None
    interpolant: str = "linear"
    prediction: str = "velocity"
    shift: float = 1.0
    class_dropout: float = 0.1


@dataclass(frozen=True, kw_only=True)
class _Index(_Settings):
    """`model_index.json`."""

    transformer: tuple[str, str]


class SiTPipeline(DiffusionPipeline):
    """Images of classes by a flow-matching transformer.

    vae: None for a model of pixels. id2label: names by label, several split by commas, as in
    diffusers' DiT; None: the labels' numbers. The other four are the checkpoint's objective;
    class_dropout 0 means that the null label was never trained.
    """

    _optional_components = ["vae"]  # noqa: RUF012 (diffusers adds it to a list)
    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self,
        transformer: ViT5SiT,
        vae: AutoencoderKL | AutoencoderTiny | AutoencoderDC | None = None,
        id2label: dict[str, str] | None = None,
        interpolant: str = "linear",
        prediction: str = "velocity",
        shift: float = 1.0,
        class_dropout: float = 0.1,
    ):
        super().__init__()
        if not isinstance(transformer, ViT5SiT):
            raise UserError(f"the transformer is a {type(transformer).__name__}, not a ViT5SiT")
        given = {
            "id2label": id2label,
            "interpolant": interpolant,
            "prediction": prediction,
            "shift": shift,
            "class_dropout": class_dropout,
        }
        settings = parse_json(json.dumps(given), _Settings, source=INDEX_FILE, remedy=REMEDY)
        count = transformer.num_classes
        names = settings.id2label or {str(label): str(label) for label in range(count)}
        if names.keys() != {str(label) for label in range(count)}:
            raise UserError(f"id2label must name the labels 0..{count - 1} of the transformer")
        if vae is not None and vae.config.latent_channels != transformer.in_channels:
            raise UserError(
                f"the vae has {vae.config.latent_channels} latent channels, the transformer "
                f"{transformer.in_channels}"
            )
        self.class_names = tuple(names[str(label)] for label in range(count))
        self.objective = ObjectiveConfig(
            interpolant=settings.interpolant,
            prediction=settings.prediction,
            shift=settings.shift,
            class_dropout=settings.class_dropout,
        )
        check_values(self.objective)
        self.register_modules(transformer=transformer, vae=vae)
        self.register_to_config(
            id2label={str(label): name for label, name in enumerate(self.class_names)},
            interpolant=interpolant,
            prediction=prediction,
            shift=shift,
            class_dropout=class_dropout,
        )

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: object) -> SiTPipeline:
        """As diffusers' own; the files of a local folder are checked first."""
        folder, weights = Path(source), {}
        if folder.is_dir():
            read_json(folder / INDEX_FILE, _Index, remedy=REMEDY)
            weights = read_diffusers(folder / "vae", remedy=REMEDY)
        pipeline = super().from_pretrained(source, **options)
        own = {} if pipeline.vae is None else pipeline.vae.state_dict()
        if weights.keys() < own.keys():  # diffusers leaves the others random
            raise UserError(
                f"{folder / 'vae'} lacks {listed(own.keys() - weights.keys(), most=3)}; {REMEDY}"
            )
        return pipeline

    def get_label_ids(self, class_labels: str | int | Sequence[str | int]) -> list[int]:
        """Labels of classes given by name, by one of the comma-separated names, or by number."""
        if isinstance(class_labels, (str, int)):
            class_labels = [class_labels]
        labels = [
            self._label_of_name(wanted) if isinstance(wanted, str) else int(wanted)
            for wanted in class_labels
        ]
        if not labels:
            raise UserError("class_labels is empty; give names or numbers of classes")
        check_labels(labels, len(self.class_names))
        return labels

    def __call__(
        self,
        class_labels: str | int | Sequence[str | int] | None = None,
        *,
        num_images: int = 1,
        guidance_scale: float | None = None,
        guidance_channels: int | None = None,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        guidance_interval_unit: str = "t",
        guidance_schedule: str = "constant",
        guidance_reference: SiTPipeline | None = None,
        method: str = "heun",
        steps: int | None = None,
        num_inference_steps: int | None = None,
        atol: float | None = None,
        rtol: float | None = None,
        shift: float | None = None,
        eps: float | None = None,
        sde: SdeConfig = SdeConfig(),
        precision: str = "fp32",
        attention: str = "fused",
        batch_size: int = 64,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        latents: Tensor | None = None,
        indices: Sequence[int] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Images of the classes; options as in `SamplerConfig`, whose defaults hold.

        num_images: of each label, or of an unconditional model in all. guidance_reference: a worse
        model (autoguidance). num_inference_steps: diffusers' name of steps. seed: image i is a
        function of (seed, i); generator: the seed is drawn from it. latents: noise (N, C, h, w) to
        start from. output_type: pil, np or pt (0 to 1), or latent.

        indices: numbers of the images to make, each with its label or all with one: to the bit
        those of a set by `sample/generate.py` with this batch size (with an adaptive method nearly:
        its steps depend on the other labels). With more labels than indices: images of the call.
        """
        choose("output_type", output_type, OUTPUT_TYPES)
        if None not in (steps, num_inference_steps):
            raise UserError("steps and num_inference_steps are the same; give one of them")
        steps = num_inference_steps if steps is None else steps
        guidance = GuidanceConfig(
            guidance_scale, guidance_channels, guidance_interval, guidance_interval_unit,
            guidance_schedule, guidance_reference and guidance_reference.source,
        )  # fmt: skip
        options = SamplerConfig(
            self.source, method=method, steps=steps, atol=atol, rtol=rtol, shift=shift, eps=eps,
            sde=sde, precision=precision, attention=attention, batch_size=batch_size,
            seed=_seed(seed, generator), guidance=guidance,
        )  # fmt: skip
        labels = self._labels(class_labels, num_images)
        noise = None if latents is None else self._check_noise(latents, len(labels))
        if indices is not None and noise is not None:
            raise UserError("latents are the noise of all images; drop them, or indices")
        batches = _batches(labels, indices, batch_size)
        with tf32_off():  # as before afterwards
            set_precision(precision, self.transformer.device)
            draw = self._generator(options, guidance_reference)
            decode = output_type != "latent"
            images = self._draw(draw, batches, noise, decode=decode)
        self.maybe_free_model_hooks()
        images = OUTPUT_TYPES[output_type](images)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @property
    def source(self) -> str:
        """Where the pipeline was loaded from, for messages."""
        return str(self.config.get("_name_or_path") or "this pipeline")

    def _draw(
        self,
        generator: Generator,
        batches: list[Batch],
        noise: Tensor | None,
        *,
        decode: bool,
    ) -> Tensor:
        """Pixels, or latents where they are not to be decoded, batch by batch."""
        if decode and self.vae is None and self.transformer.in_channels not in (1, 3):
            raise UserError("without its vae the model makes latents only: output_type='latent'")
        parts, places = [], [place for batch in batches for place in batch.places]
        with self.progress_bar(total=len(places)) as bar:
            for batch in batches:
                made = generator.latents(
                    batch.indices,
                    batch.labels,
                    noise=None
                    if noise is None
                    else noise[batch.indices.start : batch.indices.stop],
                ).latents
                parts.append((generator.pixels(made) if decode else made)[batch.rows])
                bar.update(len(batch.rows))
        return torch.cat(parts)[torch.tensor(places).argsort()]

    def _generator(self, options: SamplerConfig, reference: SiTPipeline | None) -> Generator:
        """What draws: the networks with the options resolved."""
        for pipeline in (self, *([reference] if reference else [])):
            _bring(pipeline.transformer)
            if pipeline.transformer.dtype != torch.float32:
                raise UserError(
                    f"the transformer is in {pipeline.transformer.dtype}; load it in fp32 and use "
                    "precision='bf16', which keeps the sampler's state exact"
                )
        if reference is not None:
            check_reference(self.source, self._kind(), reference.source, reference._kind())
        settings = resolve(
            options,
            self.objective,
            class_names=self.class_names,
            channels=self.transformer.in_channels,
        )
        return Generator(
            self.transformer,
            self._codec(),
            Flow(self.objective.interpolant, self.objective.prediction),
            settings,
            None if reference is None or settings.guidance.scale == 1 else reference.transformer,
        )

    def _codec(self) -> IdentityCodec | AutoencoderCodec:
        return IdentityCodec() if self.vae is None else AutoencoderCodec(self.vae)

    def _kind(self) -> dict[str, object]:
        """As `sampling.load.kind` of a checkpoint."""
        return {
            "classes": self.class_names,
            "latents": self._codec().identity,
            "latent size": self.transformer.input_size,
            "path": self.objective.interpolant,
            "prediction": self.objective.prediction,
        }

    def _labels(
        self, class_labels: str | int | Sequence[str | int] | None, num_images: int
    ) -> list[int]:
        """One label per image; all 0 for an unconditional model."""
        if num_images < 1:
            raise UserError(f"num_images {num_images} must be at least 1")
        if not self.class_names:
            if class_labels is not None:
                raise UserError("the model is unconditional: give num_images, not class_labels")
            return [0] * num_images
        if class_labels is None:
            raise UserError(
                f"class_labels is missing: give names or numbers 0..{len(self.class_names) - 1}"
            )
        return [label for label in self.get_label_ids(class_labels) for _ in range(num_images)]

    def _label_of_name(self, wanted: str) -> int:
        if wanted not in self.class_names:
            named = [
                label
                for label, names in enumerate(self.class_names)
                if wanted in [name.strip() for name in names.split(",")]
            ]
            if len(named) > 1:
                raise UserError(
                    f"class {wanted!r} may be any of {', '.join(map(str, named))}; give the number"
                )
            if named:
                return named[0]
        return find_classes([wanted], self.class_names)[0]

    def _check_noise(self, latents: Tensor, count: int) -> Tensor:
        shape = (count, self.transformer.in_channels, *self.transformer.input_size)
        if tuple(latents.shape) != shape:
            raise UserError(f"latents {tuple(latents.shape)} must have the shape {shape}")
        return latents.float()


def _bring(model: ViT5SiT) -> None:
    """Moves a network that `enable_model_cpu_offload` keeps on the CPU to its device.

    Its hook would do so at the first call, when the noise is on the CPU already.
    """
    if hasattr(model, "_hf_hook"):
        model._hf_hook.pre_forward(model)


@dataclass(frozen=True)
class Batch:
    """Images that are made together. rows: which of them are wanted; places: of these in the
    result."""

    indices: range
    labels: list[int]
    rows: list[int]
    places: list[int]


def _batches(labels: list[int], indices: Sequence[int] | None, size: int) -> list[Batch]:
    """The batches of a call: of all its images, or those that hold the wanted ones.

    A batch is the whole call's, or as that of a large set, for equal bits.
    """
    count, wanted = len(labels), range(len(labels)) if indices is None else list(indices)
    if not wanted or any(not isinstance(index, Integral) or index < 0 for index in wanted):
        raise UserError(f"indices {wanted} must be numbers of images, 0 or above, such as [2]")
    chosen = count > len(wanted) or indices is None
    if chosen and max(wanted) >= count:
        raise UserError(f"indices {max(wanted)} must be below {count}, the number of images")
    if not chosen and count not in (1, len(wanted)):
        raise UserError(f"indices name {len(wanted)} images for {count} labels; give one for each")
    batches = []
    for number in sorted({index // size for index in wanted}):
        start = int(number) * size
        batch = range(start, min(start + size, count) if chosen else start + size)
        places = [place for place, index in enumerate(wanted) if index // size == number]
        rows = [int(wanted[place]) - start for place in places]
        if chosen:
            given = labels[start : batch.stop]
        else:  # the labels of the others change nothing
            given = [labels[0]] * size
            for place, row in zip(places, rows, strict=True):
                given[row] = labels[place % count]
        batches.append(Batch(batch, given, rows, places))
    return batches


def _seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The seed; or one drawn from a generator, which two calls in a row find in two states."""
    if generator is None:
        return seed or 0
    if seed is not None:
        raise UserError("give seed or generator, not both")
    if not isinstance(generator, torch.Generator):
        raise UserError("generator must be one torch.Generator; images differ by their index")
    draw = torch.randint(2**62, (), generator=generator, device=generator.device)
    return int(draw)
