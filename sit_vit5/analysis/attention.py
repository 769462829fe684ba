"""Attention maps and suppressed channels of a network, as numbers and as figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sit_vit5.codecs import Codec, to_uint8
from sit_vit5.config import AttentionConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.loader import from_uint8
from sit_vit5.data.transforms import center_crop
from sit_vit5.evaluation.inputs import BUILT_IN, read_pixels
from sit_vit5.flow.interpolants import coefficients
from sit_vit5.models.checkpoint import Checkpoint
from sit_vit5.models.classifier import ViT5Classifier, is_classifier_folder, load_classifier
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import Attention
from sit_vit5.models.official import official_classifier, read_official
from sit_vit5.utils import rng
from sit_vit5.utils.errors import UserError, brief, index_of
from sit_vit5.utils.files import replacing
from sit_vit5.utils.run_folder import SAMPLES, run_of, step_name

# Branch by its name in pictures -> the block's gate on it.
BRANCHES = {"attention": "gate1", "MLP": "gate2"}
DEFAULT_BLOCKS = 4


@dataclass(frozen=True)
class Tokens:
    """The sequence of a ViT-5: cls if there is one, patches row by row, registers."""

    cls: int
    grid: tuple[int, int]
    registers: int

    @property
    def patches(self) -> slice:
        """Where the patches stand."""
        return slice(self.cls, self.cls + self.grid[0] * self.grid[1])

    def queries(self) -> dict[str, slice]:
        """cls and each register; the mean over all tokens where there is neither."""
        named = {"cls": slice(0, 1)} if self.cls else {}
        first = self.patches.stop
        for number in range(self.registers):
            named[f"register {number}"] = slice(first + number, first + number + 1)
        return named or {"mean over queries": slice(None)}


@dataclass(frozen=True)
class PatchMap:
    """Attention of one query to the patches. weights: (rows, columns), their sum at most 1."""

    weights: Tensor

    @property
    def share(self) -> float:
        """Attention that falls on patches; the rest goes to cls and registers."""
        return self.weights.sum().item()

    @property
    def contrast(self) -> float:
        """Largest weight over the mean weight: 1 for a query that looks everywhere alike."""
        return (self.weights.max() / self.weights.mean()).item()


@dataclass(frozen=True)
class BranchGate:
    """One branch of one block. shares: suppressed channels (M,), one number per condition."""

    shares: Tensor
    mean_scale: float


def attention_weights(
    forward: Callable[[], object], blocks: nn.ModuleList, numbers: Sequence[int]
) -> dict[int, Tensor]:
    """The weights (B, K, N, N) of the numbered blocks during `forward()`."""
    found = {}
    with ExitStack() as hooks:
        for number in numbers:

            def record(attention: Attention, inputs: tuple, number: int = number) -> None:
                q, k, _ = attention.queries_keys_values(*inputs)
                found[number] = attention.weights(q, k)

            hooks.enter_context(blocks[number].attention.register_forward_pre_hook(record))
        forward()
    return found


def patch_maps(weights: Tensor, tokens: Tokens, *, head: int | None = None) -> dict[str, PatchMap]:
    """One map per query, of one head or the mean over heads. weights: (K, N, N)."""
    chosen = weights.mean(0) if head is None else weights[head]  # (N, N)
    if not chosen.isfinite().all():
        raise UserError("the attention is not finite; check the weights")
    return {
        name: PatchMap(chosen[place, tokens.patches].mean(0).unflatten(0, tokens.grid))
        for name, place in tokens.queries().items()
    }


def block_maps(
    forward: Callable[[], object],
    blocks: nn.ModuleList,
    tokens: Tokens,
    *,
    numbers: Sequence[int] = (),
    head: int | None = None,
) -> dict[int, dict[str, PatchMap]]:
    """The maps of the first image by block and query during `forward()`."""
    numbers = choose_blocks(numbers, len(blocks))
    heads = blocks[0].attention.heads
    if head is not None and not 0 <= head < heads:
        raise UserError(f"head {head} is not in 0..{heads - 1}")
    weights = attention_weights(forward, blocks, numbers)
    return {number: patch_maps(weights[number][0], tokens, head=head) for number in numbers}


def choose_blocks(wanted: Sequence[int], depth: int) -> list[int]:
    """The wanted numbers if they exist; by default some spread evenly, the last included."""
    for number in wanted:
        if not 0 <= number < depth:
            raise UserError(f"block {number} is not in 0..{depth - 1}")
    last = max(DEFAULT_BLOCKS - 1, 1)
    spread = {round(place * (depth - 1) / last) for place in range(DEFAULT_BLOCKS)}
    return list(wanted) or sorted(spread)


def channel_scales(blocks: nn.ModuleList, conditioning: Tensor | None) -> list[dict[str, Tensor]]:
    """What multiplies each channel of each branch: (M, D) per block and branch.

    conditioning: (M, D), or None for unconditional blocks (M = 1); (1, 1) where nothing scales.
    """
    found: list[dict[str, Tensor]] = [{} for _ in blocks]
    with ExitStack() as hooks:
        for block, scales in zip(blocks, found, strict=True):
            for branch, name in BRANCHES.items():

                def record(gate, inputs, scale, scales=scales, branch=branch) -> None:
                    del gate, inputs
                    scale = torch.ones(1) if scale is None else scale  # nothing scales
                    scales[branch] = torch.atleast_2d(scale).flatten(0, -2)

                hooks.enter_context(getattr(block, name).register_forward_hook(record))
        # The scales depend on the conditioning alone: one token is enough to run the gates.
        device, width = next(blocks.parameters()).device, blocks[0].attention.proj.in_features
        count = 1 if conditioning is None else len(conditioning)
        for block in blocks:
            block(torch.zeros(count, 1, width, device=device), conditioning, None)
    return found


def suppressed_share(scale: Tensor, fraction: float) -> Tensor:
    """Share of channels with |scale| at most `fraction` of the mean |scale|. (M, D) -> (M,)."""
    size = scale.abs()
    return (size <= fraction * size.mean(-1, keepdim=True)).float().mean(-1)


def branch_gates(
    blocks: nn.ModuleList, conditioning: Tensor | None, *, fraction: float
) -> list[dict[str, BranchGate]]:
    """Suppressed shares and mean |scale| of every branch of every block."""
    gates = []
    for scales in channel_scales(blocks, conditioning):
        if not all(scale.isfinite().all() for scale in scales.values()):
            raise UserError("the gates are not finite; check the weights")
        gates.append(
            {
                branch: BranchGate(suppressed_share(scale, fraction), scale.abs().mean().item())
                for branch, scale in scales.items()
            }
        )
    return gates


# The gates of a denoiser are measured at TIMES times from 0 to 1 and at most CLASSES classes.
TIMES, CLASSES = 11, 10
# ImageNet's mean and deviation per channel, of values in [0, 1], as ViT-5's datasets.py takes them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Subject:
    """pictures: uint8 (H, W, C) by title; forward: runs the network on the image; conditioning:
    (M, D) for the gates, None without; out: where its pictures go by default."""

    name: str
    sees: str
    pictures: dict[str, np.ndarray]
    blocks: nn.ModuleList
    tokens: Tokens
    forward: Callable[[], object]
    conditioning: Tensor | None
    out: Path


def classifier_subject(options: AttentionConfig, device: torch.device) -> Subject:
    """A classifier, its image normalised as ViT-5's are; grey ones to [-1, 1] as our data."""
    path = Path(options.classifier)
    model = open_classifier(path, heads=options.heads).to(device)
    side, channels = options.image_size or model.image_size[0], model.in_channels
    grid = model.backbone.grid((side, side))
    image, _ = open_image(options.image)
    pixels = fit_image(image, side, channels)
    images = from_uint8(torch.from_numpy(pixels[None])).to(device)
    if channels == 3:
        mean, deviation = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, DEVIATION))
        images = ((images + 1) / 2 - mean) / deviation
    return Subject(
        name=path.name,
        sees=Path(options.image).name,
        pictures={"image": pixels},
        blocks=model.blocks,
        tokens=Tokens(1, grid, model.backbone.recipe.registers),
        forward=lambda: model(images),
        conditioning=None,
        out=path.with_name(f"{path.stem}_attention"),
    )


def open_classifier(path: Path, *, heads: int | None) -> ViT5Classifier:
    """A converted folder's classifier, or an official file's."""
    if is_classifier_folder(path):
        return load_classifier(path)
    return official_classifier(read_official(path).weights, path, heads=heads)


def denoiser_subject(
    options: AttentionConfig,
    checkpoint: Checkpoint,
    *,
    model: Denoiser,
    codec: Codec,
    label: int | None,
) -> Subject:
    """A denoiser, its image encoded and noised to t as in training. label: the asked class."""
    device, trained = next(model.parameters()).device, checkpoint.config
    shape = (model.in_channels, *model.input_size)
    side, _, channels = codec.image_shape(shape)
    built_in = "digits:0" if trained.data.source == "digits" else None
    image, digit = open_image(options.image or built_in)
    label = choose_label(label, digit, checkpoint)
    pixels = fit_image(image, side, channels)

    def noise(purpose: str) -> Tensor:
        return torch.from_numpy(rng.normal(options.seed, purpose, shape, indices=[0])).to(device)

    images = from_uint8(torch.from_numpy(pixels[None])).to(device)
    latents = codec.encode(images, noise("posterior") if codec.draws_noise else None)
    t = torch.full((1,), options.t, device=device)
    path = coefficients(trained.objective.interpolant, t, latents)
    x_t = path.alpha_t * latents + path.sigma_t * noise("noise")
    names, step = checkpoint.state.class_names, checkpoint.state.step
    labels = None if label is None else torch.tensor([label], device=device)
    named = "no class" if label in (None, model.null_label) else f"class {names[label]}"
    return Subject(
        name=f"{trained.name or trained.model}, step {step}, {options.weights}",
        sees=f"{options.image or built_in} as {named}, t = {options.t:g}",
        pictures={
            "image": pixels,
            f"x_t, t = {options.t:g}": to_uint8(codec.decode(x_t))[0].cpu().numpy(),
        },
        blocks=model.blocks,
        tokens=Tokens(0, model.backbone.grid(model.input_size), model.backbone.recipe.registers),
        forward=lambda: model(x_t, t, labels),
        conditioning=conditions(model),
        out=run_of(checkpoint.folder) / SAMPLES / f"attention_{step_name(step)}",
    )


def conditions(model: Denoiser) -> Tensor:
    """The conditioning (M, D) of all pairs of a set of times and of classes."""
    device = next(model.parameters()).device
    count = max(1, min(CLASSES, model.num_classes))
    classes = torch.linspace(0, max(model.num_classes - 1, 0), count, device=device).long()
    t = torch.linspace(0, 1, TIMES, device=device)
    return model.conditioning(t.repeat_interleave(count), classes.repeat(TIMES))


def choose_label(wanted: int | None, digit: int | None, checkpoint: Checkpoint) -> int | None:
    """The wanted class, else the digit's own, else the null label; None if unconditional."""
    names = checkpoint.state.class_names
    if wanted is not None or not names:
        return wanted
    if str(digit) in names:
        return names.index(str(digit))
    if not checkpoint.config.objective.class_dropout:
        raise UserError("the model has not learned its null label (class_dropout 0); give --label")
    return len(names)


def open_image(text: str | None) -> tuple[Image.Image, int | None]:
    """An image file, or one of the built-in digits with its label."""
    if text is None:
        raise UserError("no image given: use --image FILE, or a built-in digit such as digits:0")
    name, _, number = text.rpartition(":")
    if name in BUILT_IN and not Path(text).exists():
        return _digit(name, number)
    if not Path(text).is_file():
        raise UserError(f"image {text} does not exist; give a file or a digit such as digits:0")
    return Image.fromarray(read_pixels(Path(text))), None


def _digit(name: str, number: str) -> tuple[Image.Image, int]:
    digits = Digits(BUILT_IN[name])
    if (index := index_of(number, len(digits))) is None:
        raise UserError(f"{name} has no image {brief(number)!r}; use 0 to {len(digits) - 1}")
    pixels, label = digits.load(index)
    return Image.fromarray(pixels[..., 0]), label


def fit_image(image: Image.Image, side: int, channels: int) -> np.ndarray:
    """Cropped and resized as the training images: uint8 (side, side, channels)."""
    grey = channels == 1
    pixels = center_crop(image.convert("L" if grey else "RGB"), side)
    return np.array(pixels[..., None] if grey else pixels)  # torch wants a writable copy


# Inches: the side of a map, and the width that a letter of the title may take.
TILE, LETTER = 1.75, 0.09
# Branch -> colour, marker and its size: two lines at the same height both show.
STYLES = {"attention": ("tab:blue", "o", 9), "MLP": ("tab:orange", "s", 5)}


def draw_maps(
    path: Path,
    rows: Mapping[int, Mapping[str, PatchMap]],
    pictures: Mapping[str, np.ndarray],
    *,
    title: str,
    interpolation: str,
) -> None:
    """Saves a PNG: a row per block; the pictures, then one map per query."""
    # Imported here: matplotlib takes a second; Figure needs no display and no global state.
    from matplotlib.figure import Figure

    columns = len(pictures) + len(next(iter(rows.values())))
    needed = max(map(len, title.splitlines())) * LETTER
    size = (max(TILE * columns + 0.5, needed), (TILE + 0.42) * len(rows) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for (number, maps), line in zip(rows.items(), axes, strict=True):
        line[0].set_ylabel(f"block {number}", fontsize=10)
        for axis, picture in zip(line, pictures.values(), strict=False):
            axis.imshow(np.broadcast_to(picture, (*picture.shape[:2], 3)))
        for axis, found in zip(line[len(pictures) :], maps.values(), strict=True):
            axis.imshow(
                found.weights.cpu().numpy(), vmin=0, interpolation=interpolation, cmap="viridis"
            )
            text = f"{found.share:.0%} on patches\nlargest {found.contrast:.1f}x mean"
            axis.set_xlabel(text, fontsize=8)
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    for axis, name in zip(axes[0], [*pictures, *next(iter(rows.values()))], strict=True):
        axis.set_title(name, fontsize=10)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def draw_gates(
    path: Path, gates: Sequence[Mapping[str, BranchGate]], *, title: str, fraction: float
) -> None:
    """Saves a PNG: the share of suppressed channels by block, a line per branch; a band shows its
    range over the conditions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    numbers = range(len(gates))
    for branch, (color, marker, markersize) in STYLES.items():
        shares = [block[branch].shares.cpu() for block in gates]
        means = [share.mean().item() for share in shares]
        axis.plot(
            numbers,
            means,
            color=color,
            marker=marker,
            markersize=markersize,
            label=branch,
            clip_on=False,  # a line at 0 would be cut in half
        )
        if max(map(len, shares)) > 1:
            low, high = ([pick(share).item() for share in shares] for pick in (min, max))
            axis.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set(xlabel="block", ylabel=f"channels with |scale| at most {fraction:g} of the mean")
    axis.set_ylim(0, max(0.05, 1.1 * axis.get_ylim()[1]))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(title="branch", frameon=False)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def gates_table(gates: Sequence[Mapping[str, BranchGate]], *, fraction: float) -> str:
    """Suppressed shares (mean, range over the conditions) and mean |scale|, a line per block."""
    head = "".join(f"{name:>24}{'mean |scale|':>14}" for name in BRANCHES)
    lines = [f"channels with |scale| at most {fraction:g} of the branch's mean", f"block{head}"]
    for number, block in enumerate(gates):
        line = f"{number:>5}"
        for branch in BRANCHES:
            shares = block[branch].shares
            low, high = shares.min().item(), shares.max().item()
            spread = f" ({low:.1%} to {high:.1%})" if len(shares) > 1 else ""
            line += f"{shares.mean().item():.1%}{spread}".rjust(24)
            line += f"{block[branch].mean_scale:>14.3g}"
        lines.append(line)
    return "\n".join(lines)
