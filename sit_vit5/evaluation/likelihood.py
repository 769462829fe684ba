"""Log-likelihood of images under a checkpoint's ODE, in nats and in bits per dimension.

Every random number belongs to (seed, purpose, image): which images, their dequantisation, their
latents' noise and their probes. So a value does not depend on processes, and on the batch only by
rounding; with an adaptive method also by the tolerances, since a batch shares its steps.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sit_vit5 import __version__
from sit_vit5.codecs import Codec
from sit_vit5.config import DataConfig, LikelihoodConfig, likelihood_sampler
from sit_vit5.config.parse import to_dict
from sit_vit5.data import Source, build_source
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.loader import from_uint8
from sit_vit5.data.transforms import BadImage
from sit_vit5.evaluation.inputs import BUILT_IN
from sit_vit5.sampling.generator import Generator
from sit_vit5.sampling.likelihood import bits_per_dimension, log_likelihood
from sit_vit5.sampling.load import LoadedModel, load
from sit_vit5.utils import rng
from sit_vit5.utils.distributed import Processes, gather
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.memory import memory_errors
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import SAMPLES, run_of, step_name

LEVELS_PER_UNIT = 127.5  # of our grey scale, grey / 127.5 - 1
# The sampler's settings that decide a likelihood.
SOLVER_OPTIONS = ("method", "steps", "atol", "rtol", "precision", "attention", "seed")


@dataclass(frozen=True)
class Draws:
    """Random draws of an image's likelihood. uniform: dequantise by one grey level."""

    seed: int
    probes: int = 1
    uniform: bool = True


@dataclass(frozen=True)
class Summary:
    """Mean and its standard error over images."""

    mean: float
    error: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Summary of values; the error is None for fewer than two."""
        error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None
        return Summary(float(np.mean(values)), None if error is None else float(error))

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.error is None else f" +- {self.error:.4f}")


def image_log_likelihood(
    generator: Generator,
    images: np.ndarray,
    labels: Sequence[int],
    indices: Sequence[int],
    draws: Draws,
) -> tuple[Tensor, int]:
    """Nats (B,) of uint8 images (B, H, W, C) given labels, and the evaluations of the velocity.

    The density is that of the latents: of the pixels on [-1, 1] where the codec is the identity.
    """
    device = next(generator.model.parameters()).device
    latents = encode(generator.codec, images, indices, draws, device=device)
    shape = tuple(latents.shape[1:])
    signs = torch.from_numpy(probe_signs(draws, shape, indices)).to(device)
    field, _ = generator.field(torch.tensor(list(labels), device=device))
    settings = generator.settings
    result = log_likelihood(
        field,
        latents,
        lambda evaluation: signs,
        interval=settings.interval(generator.flow),
        method=settings.method,
        steps=settings.steps,
        atol=settings.atol or 0.0,
        rtol=settings.rtol or 0.0,
    )
    if not result.logp.isfinite().all():
        raise UserError("a likelihood is not finite; check the checkpoint or use --precision fp32")
    return result.logp.cpu(), field.evaluations


def encode(
    codec: Codec, images: np.ndarray, indices: Sequence[int], draws: Draws, *, device: torch.device
) -> Tensor:
    """Latents (B, c, h, w) of uint8 images, dequantised around their grey level if so drawn."""
    pixels = from_uint8(torch.from_numpy(images))
    if draws.uniform:
        shape = tuple(pixels.shape[1:])
        noise = [rng.generator(draws.seed, "dequantize", 0, i).random(shape) for i in indices]
        pixels = pixels + (torch.from_numpy(np.stack(noise)).float() - 0.5) / LEVELS_PER_UNIT
    noise = None
    if codec.draws_noise:
        shape = codec.latent_shape(tuple(pixels.shape[1:]))
        noise = torch.from_numpy(rng.normal(draws.seed, "posterior", shape, indices=indices))
        noise = noise.to(device)
    with torch.no_grad():
        return codec.encode(pixels.to(device), noise)


def probe_signs(draws: Draws, shape: tuple[int, ...], indices: Sequence[int]) -> np.ndarray:
    """Random signs (P, B, *shape), float32."""
    signs = [
        [rng.generator(draws.seed, "probe", probe, i).integers(0, 2, shape) for i in indices]
        for probe in range(draws.probes)
    ]
    return 2 * np.array(signs, np.float32) - 1


def measure(options: LikelihoodConfig, processes: Processes) -> dict:
    """The likelihood of a data set's images, as JSON values."""
    loaded = load(likelihood_sampler(options), processes.device)
    source = open_labelled(options, loaded)
    latent = is_latent(loaded)
    if latent and options.dequantize == "uniform":
        raise UserError("dequantize uniform is for models of pixels, this one is of latents")
    uniform = not latent and options.dequantize != "none"
    draws = Draws(options.seed, options.probes, uniform)
    indices = choose_images(len(source), options.num_images, options.seed)
    starts = range(0, len(indices), options.batch_size)
    groups = [indices[start : start + options.batch_size] for start in starts]
    found = []
    with progress_bar(len(indices), unit="image", shown=processes.is_main) as bar:
        for group in groups[processes.rank :: processes.count]:
            items = [load_item(source, index) for index in group]
            images = np.stack([image for image, _ in items])
            labels = [model_label(label, source, loaded, options) for _, label in items]
            with memory_errors("lower --batch-size or --probes"):
                nats, evaluations = image_log_likelihood(
                    loaded.generator, images, labels, group, draws
                )
            found += zip(group, labels, nats.tolist(), [evaluations] * len(group), strict=True)
            bar.update(min(len(group) * processes.count, bar.total - bar.n))
    places = {index: place for place, index in enumerate(indices)}
    rows = sorted(gather(found, processes), key=lambda row: places[row[0]])
    return _result(options, loaded, source, rows, draws)


def is_latent(loaded: LoadedModel) -> bool:
    """True for a latent model, whose density is not that of pixels."""
    return loaded.generator.codec.identity["name"] != "identity"


def open_labelled(options: LikelihoodConfig, loaded: LoadedModel) -> Source:
    """The data set, of images that the model makes and classes that it knows."""
    state, codec = loaded.checkpoint.state, loaded.generator.codec
    named = bool(loaded.class_names)
    if options.null_label and not (named and loaded.checkpoint.config.objective.class_dropout):
        reason = "was trained with class_dropout 0" if named else "has no classes"
        raise UserError(f"null_label is impossible: the model {reason}")
    height, width, channels = codec.image_shape((state.in_channels, *state.input_size))
    if options.data in BUILT_IN:
        source = Digits(BUILT_IN[options.data])
    else:
        flat = options.null_label or not named
        source = build_source(
            DataConfig(
                path=options.data, image_size=height, unconditional=flat, horizontal_flip=False
            )
        )
    if source.kind != "images":
        raise UserError(f"{options.data} is a latent cache; give the images that it was made from")
    if source.item_shape != (channels, height, width):
        raise UserError(
            f"{options.data} has images of {source.item_shape}, the model of "
            f"{(channels, height, width)} (channels, height, width)"
        )
    foreign = [name for name in source.class_names if name not in loaded.class_names]
    if named and foreign and not options.null_label:
        raise UserError(
            f"class {foreign[0]!r} of {options.data} is none of the model's; use --null-label True "
            "for the likelihood without classes"
        )
    return source


def choose_images(count: int, wanted: int, seed: int) -> list[int]:
    """Indices of a random choice; a shorter choice is a prefix of a longer one. wanted 0: all."""
    if wanted > count:
        raise UserError(f"num_images {wanted} must be at most {count}, or 0 for all")
    return rng.generator(seed, "likelihood images").permutation(count)[: wanted or count].tolist()


def load_item(source: Source, index: int) -> tuple[np.ndarray, int]:
    """uint8 (H, W, C) and label in the data set."""
    try:
        return source.load(index)
    except BadImage as error:
        raise UserError(str(error)) from None


def model_label(label: int, source: Source, loaded: LoadedModel, options: LikelihoodConfig) -> int:
    """The model's label of the same class name, the null label if requested, 0 without classes."""
    if not loaded.class_names:
        return 0
    if options.null_label:
        return loaded.generator.model.null_label
    return loaded.class_names.index(source.class_names[label])


def _result(
    options: LikelihoodConfig, loaded: LoadedModel, source: Source, rows: list[tuple], draws: Draws
) -> dict:
    """rows: (index, label, nats, evaluations) of each image."""
    indices, labels, nats, evaluations = map(list, zip(*rows, strict=True))
    state, latent = loaded.checkpoint.state, is_latent(loaded)
    dimensions = state.in_channels * math.prod(state.input_size)
    unit = 1.0 if latent else LEVELS_PER_UNIT
    logp = torch.tensor(nats, dtype=torch.float64)
    bits = bits_per_dimension(logp, dimensions, levels_per_unit=unit)
    checkpoint, settings = loaded.checkpoint, to_dict(loaded.generator.settings)
    per_image, per_dimension = Summary.of(nats), Summary.of(bits.tolist())
    return {
        "command": shlex.join(sys.argv),
        "checkpoint": str(checkpoint.folder),
        "weights": checkpoint.weights_name(options.weights),
        "step": state.step,
        "data": source.identity,
        "count": len(nats),
        "nats_per_image": per_image.mean,
        "nats_standard_error": per_image.error,
        "bits_per_latent_dimension" if latent else "bits_per_dimension": per_dimension.mean,
        "bits_standard_error": per_dimension.error,
        "dimensions": dimensions,
        "codec": loaded.generator.codec.identity,
        "dequantize": "uniform" if draws.uniform else "none",
        "conditional": bool(loaded.class_names) and not options.null_label,
        "probes": draws.probes,
        "solver": {name: settings[name] for name in SOLVER_OPTIONS},
        "interval": list(loaded.generator.settings.interval(loaded.generator.flow)),
        "evaluations_mean": float(np.mean(evaluations)),
        "notes": _notes(loaded, draws),
        "indices": indices,
        "labels": labels,
        "nats": nats,
        "versions": {"sit_vit5": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }


def _notes(loaded: LoadedModel, draws: Draws) -> list[str]:
    notes = []
    if is_latent(loaded):
        notes.append(
            "the density is that of the codec's normalised latents: bits per latent dimension are "
            "not bits per pixel, and not comparable with another codec's"
        )
    elif not draws.uniform:
        notes.append(
            "without dequantisation the bits are density x grey level at each level, not a bound"
        )
    start, end = loaded.generator.settings.interval(loaded.generator.flow)
    if (start, end) != (0.0, 1.0):
        notes.append(
            f"the ODE runs over t from {start:g} to {end:g}: the density is that of x_t at "
            f"t = {end:g}"
        )
    return notes


def report(result: dict) -> str:
    """The result as text."""
    latent = "bits_per_latent_dimension" in result
    name = "bits per latent dimension" if latent else "bits per dimension"
    bits = Summary(result[name.replace(" ", "_")], result["bits_standard_error"])
    nats = Summary(result["nats_per_image"], result["nats_standard_error"])
    given = "given the class" if result["conditional"] else "without class"
    solver = {key: value for key, value in result["solver"].items() if value is not None}
    lines = [
        f"log-likelihood of {result['count']} images of {result['data']['source']}, {given}, under "
        f"{result['checkpoint']}, {result['weights']}",
        f"nats per image             {nats}",
        f"{name:<26} {bits}  ({result['dimensions']} dimensions)",
        "mean and standard error over images",
        f"solver: {', '.join(f'{key} {value}' for key, value in solver.items())}, "
        f"{result['evaluations_mean']:g} evaluations, {result['probes']} probes per image, "
        f"dequantisation {result['dequantize']}",
    ]
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


def json_path(options: LikelihoodConfig, checkpoint: Path, step: int) -> Path:
    """Path of the JSON."""
    own = run_of(checkpoint) / SAMPLES / f"likelihood_{step_name(step)}.json"
    return Path(options.out) if options.out else own
