"""Filling a sample set on any number of processes."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from sit_vit5 import __version__
from sit_vit5.checkpoint import open_checkpoint
from sit_vit5.cli import to_dict
from sit_vit5.config import ADAPTIVE_METHODS, GenerateConfig
from sit_vit5.distributed import Processes, one_word
from sit_vit5.errors import UserError
from sit_vit5.files import file_hash, lock
from sit_vit5.memory import memory_errors
from sit_vit5.progress import progress_bar
from sit_vit5.run_folder import ARCHIVE, SAMPLES, run_of, step_name
from sit_vit5.sampling.generator import choose_labels, find_classes
from sit_vit5.sampling.load import Loaded, load
from sit_vit5.sampling.sample_set import SampleSet, write_pngs
from sit_vit5.streams import printable


def generate(options: GenerateConfig, processes: Processes) -> Path:
    """Makes the missing images of the set, packs it on the main process, prints its path."""
    loaded = load(options, processes.device)
    folder = Path(options.out) if options.out else _default_folder(options, loaded)
    with progress_bar(options.num_samples, unit="image", shown=processes.is_main) as bar:
        made = complete_set(folder, options, loaded, processes, bar=bar)
    if processes.is_main:
        if not made:
            print(f"complete already, made with the same settings: {folder}")
        if options.png:
            write_pngs(folder)
        print(folder / ARCHIVE)
    return folder / ARCHIVE


def complete_set(
    folder: Path, options: GenerateConfig, loaded: Loaded, processes: Processes, *, bar: tqdm
) -> bool:
    """Makes the missing images of the set in a folder; False if it was complete already.

    Images are made in fixed groups of batch_size consecutive indices, the last one padded: a group
    gives the same bits whatever was made before, and whichever process makes it. bar: counts the
    images of all processes; those that are there already are taken off its total.
    """
    classes = _classes(options, loaded.class_names)
    samples = SampleSet(
        folder,
        _settings(options, loaded, classes),
        count=options.num_samples,
        shape=image_shape(loaded),
    )
    with ExitStack() as held:
        with one_word(processes):
            if processes.is_main:
                held.enter_context(lock(folder, "sampling run"))
                samples.prepare()
        if not samples.partial.exists():
            bar.total -= options.num_samples
            return False
        started = time.time()
        samples.open()
        try:
            made = _fill(samples, loaded, options, classes, processes, bar)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{samples.done()} of {options.num_samples} images are made; the same command "
                "makes the others"
            ) from None
        processes.wait()
        if processes.is_main:
            facts = _facts(options, loaded, processes, time.time() - started, made)
            samples.finish(_labels(range(options.num_samples), options, classes), facts)
    return True


def _fill(
    samples: SampleSet,
    loaded: Loaded,
    options: GenerateConfig,
    classes: list[int],
    processes: Processes,
    bar: tqdm,
) -> int:
    """Makes this process's share of the missing groups; how many images that were."""
    starts = range(0, options.num_samples, options.batch_size)
    groups = [range(s, min(s + options.batch_size, options.num_samples)) for s in starts]
    missing = [group for group in groups if samples.missing(group)]
    processes.wait()  # every process has looked before one fills
    mine = missing[processes.rank :: processes.count]
    bar.total -= options.num_samples - sum(map(len, missing))
    for group in mine:
        padded = range(group.start, group.start + options.batch_size)
        with memory_errors("lower --batch-size"):
            images = loaded.generator(padded, _labels(padded, options, classes))
        pixels = images.pixels.numpy()[: len(group)]
        samples.write(group, pixels, images.evaluations, images.passes)
        bar.set_postfix(evaluations=images.evaluations, passes=images.passes, refresh=False)
        # The other processes are about as fast.
        bar.update(min(len(group) * processes.count, bar.total - bar.n))
    return sum(map(len, mine))


def _labels(indices: range, options: GenerateConfig, classes: list[int]) -> list[int]:
    # Given labels are a cycle of their own: image i has the i-th.
    mode = options.labels if options.labels_file is None else "balanced"
    return choose_labels(indices, classes=classes, mode=mode, seed=options.seed)


def _classes(options: GenerateConfig, class_names: tuple[str, ...]) -> list[int]:
    """The labels to choose from, or those of a file, one per image."""
    if options.labels_file is None:
        return find_classes(options.classes, class_names)
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


def _settings(options: GenerateConfig, loaded: Loaded, classes: list[int]) -> dict:
    """Everything that decides the images."""
    checkpoint = loaded.checkpoint
    weights_file = checkpoint.folder / checkpoint.weights_file(options.weights)
    return {
        "weights_sha256": file_hash(weights_file),
        "weights": weights_file.stem,
        "step": checkpoint.state.step,
        "model": checkpoint.config.model,
        "objective": to_dict(checkpoint.config.objective),
        "sampler": to_dict(loaded.generator.settings),
        "guidance_reference_sha256": _reference_hash(options),
        # An adaptive method's steps are those of a whole batch.
        "batch_size": options.batch_size if options.method in ADAPTIVE_METHODS else None,
        "num_samples": options.num_samples,
        "labels": options.labels if options.labels_file is None else "given",
        "classes": classes,
        "codec": loaded.generator.codec.identity,
        "image_shape": list(image_shape(loaded)),
    }


def _reference_hash(options: GenerateConfig) -> str | None:
    """Of the worse network's weights under autoguidance."""
    if options.guidance.reference is None:
        return None
    reference = open_checkpoint(options.guidance.reference)
    return file_hash(reference.folder / reference.weights_file(options.guidance.reference_weights))


def _facts(
    options: GenerateConfig, loaded: Loaded, processes: Processes, seconds: float, made: int
) -> dict:
    """What else describes how the set was made."""
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


def image_shape(loaded: Loaded) -> tuple[int, int, int]:
    """(H, W, C) of a decoded image."""
    state = loaded.checkpoint.state
    return loaded.generator.codec.image_shape((state.in_channels, *state.input_size))


def _default_folder(options: GenerateConfig, loaded: Loaded) -> Path:
    run = run_of(loaded.checkpoint.folder)
    return run / SAMPLES / f"{step_name(loaded.checkpoint.state.step)}_{options.num_samples}"
