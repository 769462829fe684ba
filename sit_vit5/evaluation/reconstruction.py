"""Reconstruction quality of a codec: rFID, PSNR, SSIM and LPIPS."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sit_vit5.codecs import Codec, configured_codec, to_uint8
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import ReconstructionConfig
from sit_vit5.config.parse import to_dict
from sit_vit5.data import Source
from sit_vit5.data.loader import from_uint8, posterior_noise
from sit_vit5.evaluation.inputs import device_name, versions
from sit_vit5.evaluation.real_sets import (
    good_indices,
    image_shape,
    open_extractor,
    open_source,
    visit_images,
)
from sit_vit5.evaluation.report import metric_name
from sit_vit5.metrics.features import POOL, Extractor
from sit_vit5.metrics.fid import frechet_distance, self_test
from sit_vit5.metrics.reference import POOL_KEYS
from sit_vit5.metrics.similarity import Similarity, Unavailable, lpips, psnr, ssim
from sit_vit5.metrics.statistics import Moments, Statistics
from sit_vit5.sampling.grid import draw_grid
from sit_vit5.utils import rng
from sit_vit5.utils.arrays import members
from sit_vit5.utils.distributed import Processes, gather
from sit_vit5.utils.errors import UserError, nearest_multiples
from sit_vit5.utils.files import save_image
from sit_vit5.utils.precision import set_tf32
from sit_vit5.utils.progress import progress_bar

UNITS = {"psnr": "dB, higher is better", "ssim": "higher is better", "lpips": "lower is better"}


def mean_of(values: np.ndarray) -> dict:
    """Mean over images and its standard error, of the finite ones; None without any."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"mean": None, "error": None}
    error = float(finite.std(ddof=1) / math.sqrt(len(finite))) if len(finite) > 1 else None
    return {"mean": float(finite.mean()), "error": error}


def report(result: dict) -> str:
    """The result as a table."""
    rows = [(result["name"], f"{result['frechet_distance']:.4f}", "against the originals")]
    for name, unit in UNITS.items():
        if name in result:
            mean, error = result[name]["mean"], result[name]["error"]
            value = "infinite" if mean is None else f"{mean:.4f}"
            rows.append((name.upper(), value, unit + (f", +- {error:.4f}" if error else "")))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]
    return "\n".join(lines + [f"note: {note}" for note in result["notes"]])


AMPLIFIED = 4  # times the differences in the figure


@dataclass
class Pairs:
    """Sums over originals and reconstructions as they pass. shown: the pairs in the figure."""

    originals: Moments = field(default_factory=Moments)
    reconstructions: Moments = field(default_factory=Moments)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    shown: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    bad: int = 0


@dataclass(frozen=True)
class Tools:
    """Codec, extractor and similarities of a run. similarities: by name, the available ones."""

    codec: Codec
    extractor: Extractor
    similarities: Mapping[str, Similarity]
    device: torch.device


def reconstruct(
    options: ReconstructionConfig, processes: Processes
) -> tuple[dict, list[tuple[np.ndarray, np.ndarray]]]:
    """The result as JSON values, and some originals and reconstructions (H, W, C) to show.

    Every process takes its share of the images and gets the same result, but its own to show.
    """
    self_test()
    set_tf32(False)
    check_no_reference(options.data)
    source = open_source(options, options.data)
    chosen = choose_images(len(source), options.num_images, options.seed)
    codec = configured_codec(options.codec)
    check_divisible(source, codec)
    similarities, notes = find_similarities(options, image_shape(source), processes.device)
    tools = Tools(codec, open_extractor(options), similarities, processes.device)
    share = np.array_split(chosen, processes.count)[processes.rank]
    pairs = _run(options, source, share, tools, shown=processes.is_main)
    return _result(options, source, tools, _joined(pairs, processes), notes), pairs.shown


def check_no_reference(data: str) -> None:
    """Refuse the reference of generated samples: it is of other images and of another crop."""
    path = Path(data)
    if path.suffix == ".npz" and path.is_file() and set(POOL_KEYS) <= set(members(path)):
        raise UserError(
            f"{path} is a reference for generated samples; reconstructions are compared with their "
            "own originals: give the images themselves, such as the validation set"
        )


def check_divisible(source: Source, codec: Codec) -> None:
    """Refuse images that the codec does not take."""
    _, height, _ = source.item_shape
    if height % codec.factor:
        raise UserError(
            f"image_size {height} is not divisible by the codec's factor {codec.factor}; use "
            f"{nearest_multiples(height, codec.factor)}"
        )
    codec.latent_shape(source.item_shape)


def choose_images(count: int, wanted: int, seed: int) -> np.ndarray:
    """Sorted indices of a random choice; wanted 0: all."""
    if wanted > count:
        raise UserError(f"num_images {wanted} must be at most {count}, or 0 for all")
    order = rng.generator(seed, "reconstructed images").permutation(count)
    return np.sort(order[: wanted or count])


def find_similarities(
    options: ReconstructionConfig, shape: tuple[int, int, int], device: torch.device
) -> tuple[dict[str, Similarity], list[str]]:
    """Return available similarities and notes on others; LPIPS is required if it has weights."""
    builders = {
        "psnr": lambda: psnr,
        "ssim": lambda: ssim(shape, device),
        "lpips": lambda: lpips(shape, device, network=options.lpips, weights=options.lpips_weights),
    }
    found, notes = {}, []
    for name, build in builders.items():
        try:
            found[name] = build()
        except Unavailable as error:
            if name == "lpips" and options.lpips_weights is not None:
                raise
            notes.append(f"{name} left out: {error}")
    return found, notes


def _run(
    options: ReconstructionConfig,
    source: Source,
    share: np.ndarray,
    tools: Tools,
    *,
    shown: bool,
) -> Pairs:
    """This process's images through codec and extractor."""
    batches = [
        share[start : start + options.batch_size].tolist()
        for start in range(0, len(share), options.batch_size)
    ]
    # Spread over the share: neighbours are mostly of one class.
    places = np.linspace(0, len(share) - 1, options.columns).astype(int)
    drawn = share[places] if len(share) else share
    pairs = Pairs(values={name: [] for name in tools.similarities})
    with progress_bar(len(share), unit="image", title="reconstruct", shown=shown) as bar:
        for visit in visit_images(source, batches, options):
            pairs.bad += len(visit.bad)
            if len(visit.pixels):
                originals = np.ascontiguousarray(visit.pixels)
                indices = good_indices(visit)
                found = round_trip(tools.codec, originals, indices, options, tools.device)
                _add(pairs, originals, found, tools, shown=np.isin(indices, drawn))
            bar.update(len(visit.indices))
    return pairs


@torch.inference_mode()
def round_trip(
    codec: Codec,
    originals: np.ndarray,
    indices: np.ndarray,
    options: ReconstructionConfig,
    device: torch.device,
) -> np.ndarray:
    """uint8 (B, H, W, C) encoded and decoded. The draw of an image depends on its index alone."""
    images = from_uint8(torch.from_numpy(originals).to(device))  # (B, C, H, W)
    noise = None
    if codec.draws_noise:
        shape = codec.latent_shape(tuple(images.shape[1:]))
        if options.posterior == "sample":
            noise = posterior_noise(options.seed, shape, 0, indices.tolist()).to(device)
        else:
            noise = torch.zeros(len(images), *shape, device=device)
    decoded = codec.decode(codec.encode(images, noise))
    if not decoded.isfinite().all():
        raise UserError(
            f"codec {options.codec.name} decodes to images that are not finite, such as one of "
            f"{indices.tolist()[:4]}; check its weights"
        )
    return to_uint8(decoded).cpu().numpy()


def _add(
    pairs: Pairs, originals: np.ndarray, found: np.ndarray, tools: Tools, *, shown: np.ndarray
) -> None:
    """Add a batch. shown: bool (B,), which pairs go into the figure."""
    for moments, images in ((pairs.originals, originals), (pairs.reconstructions, found)):
        moments.add(tools.extractor(images, (POOL,))[POOL])
    for name, similarity in tools.similarities.items():
        pairs.values[name].append(similarity(originals, found))
    pairs.shown += zip(originals[shown], found[shown], strict=True)


@dataclass(frozen=True)
class _Joined:
    """Merged pairs of all processes."""

    originals: Statistics
    reconstructions: Statistics
    values: dict[str, np.ndarray]
    bad: int


def _joined(pairs: Pairs, processes: Processes) -> _Joined:
    """Merge the pairs of all processes, in their order."""
    names = list(pairs.values)
    own = {name: np.concatenate([np.zeros(0), *pairs.values[name]]) for name in names}
    count = len(own["psnr"])
    both = (pairs.originals.statistics(), pairs.reconstructions.statistics()) if count else None
    parts = gather([(both, own, pairs.bad)], processes)
    statistics = [part[0] for part in parts if part[0] is not None]
    if not statistics:
        raise UserError(
            "no image can be decoded; look at the data with sit_vit5.analysis.inspect_data"
        )
    originals, reconstructions = statistics[0]
    for first, second in statistics[1:]:
        originals, reconstructions = originals.merge(first), reconstructions.merge(second)
    values = {name: np.concatenate([part[1][name] for part in parts]) for name in names}
    return _Joined(originals, reconstructions, values, sum(part[2] for part in parts))


def _result(
    options: ReconstructionConfig,
    source: Source,
    tools: Tools,
    joined: _Joined,
    notes: list[str],
) -> dict:
    a, b = joined.originals, joined.reconstructions
    distance = frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    inception = options.features == "inception"
    if a.count <= len(a.mean):
        notes.append(
            f"{a.count} images for {len(a.mean)} features: the distance is biased; compare equal "
            "counts only"
        )
    if exact := int(np.isinf(joined.values["psnr"]).sum()):
        notes.append(f"{exact} images come back exactly; PSNR is the mean over the others")
    return {
        "command": shlex.join(sys.argv),
        "count": a.count,
        "bad_images": joined.bad,
        "name": ("r" if inception else "") + metric_name(options.features, a.count),
        "frechet_distance": distance,
        **{name: mean_of(values) for name, values in joined.values.items()},
        "data": source.identity,
        "image_shape": list(image_shape(source)),
        "codec": RecordedCodec.of(tools.codec, options.codec.name).record(),
        "extractor": tools.extractor.identity,
        "settings": {
            key: value
            for key, value in to_dict(options).items()
            if key in ("posterior", "num_images", "seed", "lpips")
        },
        "notes": notes,
        "device": device_name(),
        "versions": versions(),
    }


def draw(path: Path, shown: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Save a figure with a row each of originals, reconstructions and their differences."""
    originals, found = (np.stack(side) for side in zip(*shown, strict=True))
    difference = np.abs(originals.astype(np.int64) - found) * AMPLIFIED
    images = [originals, found, np.minimum(difference, 255).astype(np.uint8)]
    rows = ["original", "reconstruction", f"difference x {AMPLIFIED}"]
    save_image(path, draw_grid({"": np.concatenate(images)}, rows, len(originals)))
