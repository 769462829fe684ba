"""Images by index: image i is a function of (seed, i, label, settings) and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sit_vit5.codecs import Codec, to_uint8
from sit_vit5.config import ADAPTIVE_METHODS, SDE_METHODS, SdeConfig
from sit_vit5.flow.predictions import Flow
from sit_vit5.flow.times import sampling_interval
from sit_vit5.models.denoiser import Denoiser, check_labels
from sit_vit5.models.layers import set_attention
from sit_vit5.sampling.field import Field, Guidance, Network, guided
from sit_vit5.sampling.ode import SOLVERS, STAGES, Observer, adaptive, ignore, shifted_grid
from sit_vit5.sampling.sde import LAST_STEPS, SDE_SOLVERS, SDE_STAGES, Sde
from sit_vit5.utils import rng
from sit_vit5.utils.errors import UserError, brief, index_of, listed


@dataclass(frozen=True)
class Images:
    """uint8 (B, H, W, C) on the CPU, and what each image cost."""

    pixels: Tensor
    evaluations: int
    passes: int


@dataclass(frozen=True)
class Latents:
    """(B, C, h, w) on the model's device, near unit scale, and what each image cost."""

    latents: Tensor
    evaluations: int
    passes: int


@dataclass(frozen=True)
class Settings:
    """The choices that decide an image, apart from weights and label.

    steps: of fixed grids, all intervals; atol and rtol: of adaptive methods; sde: of SDE methods.
    """

    method: str
    steps: int | None = None
    atol: float | None = None
    rtol: float | None = None
    shift: float = 1.0
    eps: float | None = None
    sde: SdeConfig | None = None
    guidance: Guidance = Guidance()
    precision: str = "fp32"
    attention: str = "fused"
    seed: int = 0

    def interval(self, flow: Flow) -> tuple[float, float]:
        """(start, end) t of the solver, before an SDE's last step."""
        options: dict = {"eps": self.eps}
        if self.sde is not None:
            options["diffusion"] = self.sde.diffusion
            if self.sde.last_step != "none":
                options["last_step_size"] = self.sde.last_step_size
        start, end = sampling_interval(flow.interpolant, flow.prediction, **options)
        if end <= start:
            raise UserError(
                f"the solver would run from t {start:g} to {end:g}; use a smaller eps or "
                "sde.last_step_size"
            )
        return start, end

    def times(self, flow: Flow) -> list[float]:
        """The grid of a fixed-step method, before an SDE's last step."""
        start, end = self.interval(flow)
        steps = self.steps
        if self.sde is not None and self.sde.last_step != "none":
            steps -= 1
            if not steps:
                raise UserError("steps 1 leaves none before the sde's last step; use 2 or more")
        if self.method == "stochastic_heun" and end == 1:
            end -= self.eps or 1e-3  # its last stage asks for a score, which has no value at 1
        return shifted_grid(steps, (start, end), self.shift)


@dataclass(frozen=True)
class Generator:
    """A network that makes images: by one call, or by `latents` and then `pixels`.

    reference: the worse network of autoguidance, or None.
    """

    model: Denoiser
    codec: Codec
    flow: Flow
    settings: Settings
    reference: Denoiser | None = None

    def __call__(self, indices: Sequence[int], labels: Sequence[int]) -> Images:
        """The images of the given indices. labels: one per index, in 0..num_classes-1."""
        made = self.latents(indices, labels)
        return Images(self.pixels(made.latents), made.evaluations, made.passes)

    @torch.inference_mode()
    def latents(
        self, indices: Sequence[int], labels: Sequence[int], *, noise: Tensor | None = None
    ) -> Latents:
        """The images before the codec. noise: to start from, instead of that of seed and index."""
        if self.model.num_classes:
            check_labels(list(labels), self.model.num_classes)
        device = next(self.model.parameters()).device
        field, networks = self.field(torch.tensor(labels, device=device))
        noise = self.noise("sample", indices) if noise is None else noise
        latents = self.solve(field, noise.to(device), indices)
        return Latents(latents, field.evaluations, sum(network.passes for network in networks))

    @torch.inference_mode()
    def pixels(self, latents: Tensor) -> Tensor:
        """uint8 (B, H, W, C) on the CPU of latents (B, C, h, w)."""
        images = self.codec.decode(latents)
        if not images.isfinite().all():
            raise UserError(
                "the network or decoder returned non-finite images; none was written; check the "
                "checkpoint, lower guidance.scale or use --precision fp32"
            )
        return to_uint8(images).cpu()

    def field(self, labels: Tensor) -> tuple[Field, list[Network]]:
        """The guided field for labels (B,), and the networks that it asks."""
        models = [self.model] + ([] if self.reference is None else [self.reference])
        for model in models:
            set_attention(model, self.settings.attention)
        networks = [Network(model, precision=self.settings.precision) for model in models]
        reference = networks[1] if self.reference is not None else None
        stages = (STAGES | SDE_STAGES).get(self.settings.method, 1)
        predict = guided(
            networks[0], labels, self.settings.guidance, reference=reference, stages=stages
        )
        return Field(predict, self.flow), networks

    def solve(
        self, field: Field, noise: Tensor, indices: Sequence[int], *, observe: Observer = ignore
    ) -> Tensor:
        """Latents from noise (B, C, h, w). indices: of the images, which key an SDE's noise;
        observe: sees every state, from the noise to the latents returned."""
        settings = self.settings
        observe(noise, settings.interval(self.flow)[0])
        if settings.method in ADAPTIVE_METHODS:
            interval, tolerances = settings.interval(self.flow), (settings.atol, settings.rtol)
            return adaptive(
                field, noise, interval, method=settings.method, atol=tolerances[0],
                rtol=tolerances[1], observe=observe,
            )  # fmt: skip
        times = settings.times(self.flow)
        if settings.method not in SDE_METHODS:
            return SOLVERS[settings.method](field, noise, times, observe=observe)
        sde = Sde(field, settings.sde.diffusion, settings.sde.norm)

        def step_noise(step: int) -> Tensor:
            return self.noise("sde", indices, step=step).to(noise.device)

        x_t = SDE_SOLVERS[settings.method](sde, noise, times, step_noise, observe=observe)
        if settings.sde.last_step == "none":
            return x_t
        x_t = LAST_STEPS[settings.sde.last_step](sde, x_t, times[-1], 1 - times[-1])
        observe(x_t, 1.0)
        return x_t

    def noise(self, purpose: str, indices: Sequence[int], *, step: int = 0) -> Tensor:
        """Standard normal noise of the latents of the images, keyed by seed, purpose and step."""
        shape = (self.model.in_channels, *self.model.input_size)
        draws = rng.normal(self.settings.seed, purpose, shape, step=step, indices=indices)
        return torch.from_numpy(draws)


def choose_labels(
    indices: Sequence[int], *, classes: Sequence[int], mode: str, seed: int
) -> list[int]:
    """Label of each image index: `balanced` cycles through the classes, `random` draws one.

    classes: the labels to choose from; empty for an unconditional model (all labels 0).
    """
    if not classes:
        return [0] * len(indices)
    if mode == "balanced":
        return [classes[index % len(classes)] for index in indices]
    draws = [rng.generator(seed, "label", 0, index).integers(len(classes)) for index in indices]
    return [classes[draw] for draw in draws]


def find_classes(wanted: Sequence[str], class_names: Sequence[str]) -> list[int]:
    """Labels of classes given by name or number; all classes if none is given."""
    if wanted and not class_names:
        raise UserError("the model is unconditional: it has no classes to choose from")
    numbered = all(name.isdecimal() for name in class_names)  # then a number is a name
    labels = []
    for text in wanted:
        if text in class_names:
            labels.append(list(class_names).index(text))
        elif not numbered and (number := index_of(text, len(class_names))) is not None:
            labels.append(number)
        else:
            what = "class name" if numbered else "class name or number"
            raise UserError(
                f"class {brief(repr(text), 80)} is no {what}; "
                f"classes: {listed(class_names, most=12)}"
            )
    return labels or list(range(len(class_names)))
