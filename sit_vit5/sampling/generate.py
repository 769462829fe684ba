"""Filling a sample set on any number of processes."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from sit_vit5 import __version__
from sit_vit5.config import ADAPTIVE_METHODS, GenerateConfig
from sit_vit5.config.parse import to_dict
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.sampling.generator import choose_labels, find_classes
from sit_vit5.sampling.load import LoadedModel, load
from sit_vit5.sampling.sample_set import SampleSet, write_pngs
from sit_vit5.utils.distributed import Processes, agree
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import check_regular_file, file_hash, lock
from sit_vit5.utils.memory import memory_errors
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import ARCHIVE, SAMPLES, run_of, step_name
from sit_vit5.utils.streams import printable


def generate(options: GenerateConfig, processes: Processes) -> Path:
    """Makes the missing images of the set, packs it on the main process, prints its path."""
    loaded = load(options, processes.device)
    folder = Path(options.out) if options.out else _default_folder(options, loaded)
    count = len(wanted_indices(options))
    with progress_bar(count, unit="image", shown=processes.is_main) as bar:
        made = complete_set(folder, options, loaded, processes, bar=bar)
    if processes.is_main:
        if not made:
            print(f"complete already, made with the same settings: {folder}")
        if options.png:
            write_pngs(folder, wanted_indices(options))
        print(folder / ARCHIVE)
    return folder / ARCHIVE


def complete_set(
    folder: Path, options: GenerateConfig, loaded: LoadedModel, processes: Processes, *, bar: tqdm
) -> bool:
    """Makes the missing images of the set in a folder; False if it was complete already.

    Images are made in fixed groups of batch_size consecutive indices, the last one padded: a group
    gives the same bits whatever was made before, and whichever process makes it. bar: counts the
    images of all processes; those that are there already are taken off its total.
    """
    classes, indices = _classes(options, loaded.class_names), wanted_indices(options)
    samples = SampleSet(
        folder,
        _settings(options, loaded, classes),
        count=len(indices),
        shape=image_shape(loaded),
    )
    with ExitStack() as held:
        with agree(processes):
            if processes.is_main:
                held.enter_context(lock(folder, "sampling run"))
                samples.prepare()
        if not samples.partial.exists():
            bar.total -= len(indices)
            return False
        started = time.time()
        samples.open()
        try:
            made = _fill(samples, loaded, options, classes, processes, bar)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{samples.done()} of {len(indices)} images are made; the same command "
                "makes the others"
            ) from None
        processes.wait()
        if processes.is_main:
            facts = _facts(options, loaded, processes, time.time() - started, made)
            samples.finish(_labels(indices, options, classes), facts)
    return True


@dataclass(frozen=True)
class Group:
    """Images that are made together. batch: indices, all batch_size of them; places: of the wanted
    ones in the sample set; rows: of the same in the batch."""

    batch: range
    places: list[int]
    rows: list[int]


def wanted_indices(options: GenerateConfig) -> Sequence[int]:
    """Indices of the images to make, in the order of the sample set."""
    return options.indices or range(options.num_samples)


def groups_of(indices: Sequence[int], size: int) -> list[Group]:
    """The groups that hold these images. Groups begin at multiples of the size, whichever images
    are wanted: so an image has the same batch, and the same bits, in any choice."""
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(index // size, []).append(place)
    return [
        Group(
            range(number * size, (number + 1) * size),
            found,
            [indices[place] - number * size for place in found],
        )
        for number, found in sorted(places.items())
    ]


def _fill(
    samples: SampleSet,
    loaded: LoadedModel,
    options: GenerateConfig,
    classes: list[int],
    processes: Processes,
    bar: tqdm,
) -> int:
    """Makes this process's share of the missing groups; how many images that were."""
    groups = groups_of(wanted_indices(options), options.batch_size)
    missing = [group for group in groups if samples.missing(group.places)]
    processes.wait()  # every process has looked before one fills
    mine = missing[processes.rank :: processes.count]
    bar.total -= samples.count - sum(len(group.places) for group in missing)
    for group in mine:
        with memory_errors("lower --batch-size"):
            images = loaded.generator(group.batch, _labels(group.batch, options, classes))
        pixels = images.pixels.numpy()[group.rows]
        samples.write(group.places, pixels, images.evaluations, images.passes)
        bar.set_postfix(evaluations=images.evaluations, passes=images.passes, refresh=False)
        # The other processes are about as fast.
        bar.update(min(len(group.places) * processes.count, bar.total - bar.n))
    return sum(len(group.places) for group in mine)


def _labels(indices: Sequence[int], options: GenerateConfig, classes: list[int]) -> list[int]:
    # Given labels are a cycle of their own: image i has the i-th.
    mode = options.labels if options.labels_file is None else "balanced"
    return choose_labels(indices, classes=classes, mode=mode, seed=options.seed)


def _classes(options: GenerateConfig, class_names: tuple[str, ...]) -> list[int]:
    """The labels to choose from, or those of a file, one per image."""
    if options.labels_file is None:
        return find_classes(options.classes, class_names)
    check_regular_file(Path(options.labels_file), remedy="give another labels_file")
    try:
        lines = Path(options.labels_file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"labels_file {options.labels_file} cannot be read: {error}") from None
    wanted = [line.strip() for line in lines if line.strip()]
    if len(wanted) != options.num_samples:
        raise UserError(
            f"labels_file {options.labels_file} holds {len(wanted)} labels for num_samples "
            f"{options.num_samples}"
        )
    return find_classes(wanted, class_names)


def _settings(options: GenerateConfig, loaded: LoadedModel, classes: list[int]) -> dict:
    """Everything that decides the images."""
    checkpoint = loaded.checkpoint
    weights_file = checkpoint.folder / checkpoint.weights_file(options.weights)
    objective = to_dict(checkpoint.config.objective)
    del objective["weights_bound"]  # of the loss; older sets do not know it
    return {
        "weights_sha256": file_hash(weights_file),
        "weights": weights_file.stem,
        "step": checkpoint.state.step,
        "model": checkpoint.config.model,
        "objective": objective,
        "sampler": to_dict(loaded.generator.settings),
        "guidance_reference_sha256": _reference_hash(options),
        # An adaptive method's steps are those of a whole batch.
        "batch_size": options.batch_size if options.method in ADAPTIVE_METHODS else None,
        "num_samples": options.num_samples,
        "indices": list(options.indices) or None,
        "labels": options.labels if options.labels_file is None else "given",
        "classes": classes,
        "codec": loaded.generator.codec.identity,
        "image_shape": list(image_shape(loaded)),
    }


def _reference_hash(options: GenerateConfig) -> str | None:
    """Hash of the weights of the worse network under autoguidance."""
    if options.guidance.reference is None:
        return None
    reference = open_checkpoint(options.guidance.reference)
    return file_hash(reference.folder / reference.weights_file(options.guidance.reference_weights))


def _facts(
    options: GenerateConfig, loaded: LoadedModel, processes: Processes, seconds: float, made: int
) -> dict:
    """Further facts of how the set was made."""
    return {
        "command": printable(shlex.join(sys.argv)),
        "class_names": list(loaded.class_names),
        "checkpoint": printable(loaded.checkpoint.folder),
        "batch_size": options.batch_size,
        "processes": processes.count,
        "device": str(processes.device),
        "tf32": loaded.generator.settings.precision == "tf32",
        "seconds_of_last_session": round(seconds, 1),
        "images_made_by_main_process_in_last_session": made,
        "versions": {
            "sit_vit5": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def image_shape(loaded: LoadedModel) -> tuple[int, int, int]:
    """(H, W, C) of a decoded image."""
    state = loaded.checkpoint.state
    return loaded.generator.codec.image_shape((state.in_channels, *state.input_size))


def _default_folder(options: GenerateConfig, loaded: LoadedModel) -> Path:
    run = run_of(loaded.checkpoint.folder)
    name = f"{step_name(loaded.checkpoint.state.step)}_{options.num_samples}"
    return run / SAMPLES / (f"{name}_images" if options.indices else name)
