"""Encodes a data set once: `accelerate launch -m sit_vit5 encode --data.path DATA --out DIR`.

Training then reads moments from disk (`--data.path DIR`) and needs no autoencoder. Every image is
encoded as it is and mirrored, since a mirrored latent is not the latent of the mirrored image.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.config import EncodeConfig
from sit_vit5.utils.errors import UserError, nearest_multiples, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from sit_vit5.codecs import Codec
    from sit_vit5.data import Source
    from sit_vit5.data.cache_writer import Layout, ShardWriter
    from sit_vit5.data.loader import Visit
    from sit_vit5.utils.distributed import Processes


NAMED = 3  # images in a message


@dataclass(frozen=True)
class Job:
    """What is encoded, by what, and how it is stored."""

    options: EncodeConfig
    source: Source
    codec: Codec
    layout: Layout

    @property
    def folder(self) -> Path:
        """Of the cache."""
        return Path(self.options.out)

    def settings(self) -> dict:
        """What decides the moments: a cache begun with others is refused. Kept in the index."""
        from sit_vit5.codecs.cached import RecordedCodec
        from sit_vit5.data.latent_cache import ImageOptions

        recorded = RecordedCodec.of(self.codec, self.options.codec.name).record()
        data = self.options.data
        return {
            "data": self.source.identity,
            "images": asdict(
                ImageOptions(
                    source=data.source,
                    path=_absolute(data.path),
                    split=data.split,
                    image_column=data.image_column,
                    label_column=data.label_column,
                    unconditional=data.unconditional,
                )
            ),
            "class_names": list(self.source.class_names),
            "image_size": self.options.data.image_size,
            "latent_shape": list(self.codec.latent_shape(self.source.item_shape)),
            "moments_shape": list(self.layout.moments_shape),
            "mirrors": self.layout.mirrors,
            "dtype": self.layout.dtype,
            "shard_size": self.layout.shard_size,
            "codec": recorded,
        }


def _absolute(path: str | None) -> str | None:
    """A path of this machine from the root; a data set of the hub stays as it is."""
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


def plan_layout(options: EncodeConfig, source: Source, codec: Codec) -> Layout:
    """How the cache will lie on the disk; refuses images that the codec cannot halve."""
    from sit_vit5.data.cache_writer import Layout

    _, height, width = source.item_shape
    if height % codec.factor or width % codec.factor:
        raise UserError(
            f"data.image_size {options.data.image_size} is not divisible by the codec's factor "
            f"{codec.factor}; use {nearest_multiples(height, codec.factor)}"
        )
    channels, *size = codec.latent_shape(source.item_shape)
    return Layout(
        count=len(source),
        shard_size=options.shard_size,
        mirrors=2 if options.data.horizontal_flip else 1,
        moments_shape=(channels * (2 if codec.draws_noise else 1), *size),
        draws_noise=codec.draws_noise,
        dtype=options.dtype,
    )


def encode(job: Job, processes: Processes) -> None:
    """Makes the missing images of the cache, each process its shards; then writes the index."""
    from sit_vit5.data.cache_writer import check_folder, missing_shards
    from sit_vit5.data.latent_cache import INDEX_FILE, LatentCache
    from sit_vit5.utils.distributed import agree
    from sit_vit5.utils.files import lock

    with ExitStack() as held:
        with agree(processes):
            if processes.is_main:
                check_folder(job.folder)
                held.enter_context(lock(job.folder, "encoding"))
                prepare(job)
        if not (job.folder / INDEX_FILE).exists():
            mine = missing_shards(job.folder, job.layout)[processes.rank :: processes.count]
            processes.wait()  # every process has looked before one finishes a shard
            # Not as one word: its launcher ends the others at once, they would end hours later.
            encode_shards(job, mine, processes)
            processes.wait()
            with agree(processes):
                if processes.is_main:
                    finish(job)
        elif processes.is_main:
            LatentCache(job.folder)  # says what was taken away or changed
            print("complete already, made with the same settings")
    if processes.is_main:
        print(job.folder)


def prepare(job: Job) -> None:
    """Refuses other settings and a full disk; says what will be written."""
    from sit_vit5.data import same_data
    from sit_vit5.data.cache_writer import bytes_to_write
    from sit_vit5.data.latent_cache import SETTINGS_FILE, Encoding
    from sit_vit5.utils.files import check_same, check_space, read_json, write_json

    folder, layout, settings = job.folder, job.layout, job.settings()
    if (folder / SETTINGS_FILE).exists():
        remedy = "it was changed; encode again with another --out"
        read_json(folder / SETTINGS_FILE, Encoding, remedy=remedy)
        before = read_json(folder / SETTINGS_FILE)
        check_same(folder, compared(before), compared(settings), what="a latent cache")
        again = encode_changed(job)
        if not again and not same_data(before["data"], settings["data"]):
            data = {"data": before["data"]}, {"data": settings["data"]}
            check_same(folder, *data, what="a latent cache")
    need = bytes_to_write(folder, layout)
    free = check_space(folder, need, f"{layout.count:,} images", use="use --dtype float16")
    print(
        f"{layout.count:,} images of {len(job.source.class_names) or 'no'} classes, "
        f"{layout.mirrors} mirrors x {' x '.join(map(str, layout.moments_shape))} {layout.dtype}, "
        f"{len(layout.shards)} shards, {size_text(layout.count * layout.image_bytes)} "
        f"({size_text(need)} to write, {size_text(free)} free)"
    )
    for note in job.source.notes:
        print(note)
    write_json(folder / SETTINGS_FILE, settings)


def compared(settings: dict) -> dict:
    """Without what is for people alone: the same weights from elsewhere give the same moments.

    Nor the hashes of the data: the images are compared one by one.
    """
    codec = {key: value for key, value in settings["codec"].items() if key != "origin"}
    hashes = ("sha256", "contents")
    data = {key: value for key, value in settings["data"].items() if key not in hashes}
    kept = {key: value for key, value in settings.items() if key != "images"}
    return kept | {"codec": codec, "data": data}


def encode_changed(job: Job) -> bool:
    """Removes the shards of images that changed since they were encoded, if that is wanted.

    Whether there are any; refuses them otherwise.
    """
    from sit_vit5.data.cache_writer import changed_line, encoded_images, remove_shard
    from sit_vit5.data.fingerprints import changed_images
    from sit_vit5.data.latent_cache import INDEX_FILE

    changed = changed_images(job.source, encoded_images(job.folder, job.layout))
    if not changed:
        return False
    line = changed_line(changed, job.source)
    if job.options.changed == "error":
        raise UserError(
            f"{line}; encode them again with --changed encode, or choose another --out than "
            f"{job.folder}"
        )
    print(f"{line}: their shards are encoded again")
    (job.folder / INDEX_FILE).unlink(missing_ok=True)
    for records in changed:
        remove_shard(records)
    return True


def encode_shards(job: Job, shards: list[int], processes: Processes) -> None:
    """Encodes the missing images of these shards, read ahead by worker processes."""
    from sit_vit5.data.cache_writer import ShardWriter
    from sit_vit5.data.loader import iterate_images
    from sit_vit5.utils.progress import progress_bar

    writers = [ShardWriter(job.folder, shard, job.layout) for shard in shards]
    data, size = job.options.data, job.options.batch_size
    batches = [
        writer.missing[start : start + size]
        for writer in writers
        for start in range(0, len(writer.missing), size)
    ]
    total = sum(len(writer.missing) for writer in writers)
    stream = iterate_images(job.source, batches, workers=data.workers, fingerprints=True)
    title = f"process 1 of {processes.count}" if processes.count > 1 else ""
    with progress_bar(total, unit="image", title=title, shown=processes.is_main) as bar:
        for writer in writers:
            left = len(writer.missing)
            while left:
                visit = next(stream)
                append(job, writer, visit, processes)
                left -= len(visit.indices)
                bar.update(len(visit.indices))
            writer.finish()


def append(job: Job, writer: ShardWriter, visit: Visit, processes: Processes) -> None:
    """Encodes one batch of images and adds it to its shard."""
    from sit_vit5.data.transforms import refusal

    bad = visit.bad
    if bad and job.options.data.on_bad_image == "error":
        raise refusal(min(bad.values()))
    writer.append(moments(job, visit, processes), bad, visit.records)


def moments(job: Job, visit: Visit, processes: Processes) -> np.ndarray:
    """Moments of the good images of a batch and of their mirrors, (n, mirrors, C, h, w)."""
    import numpy as np
    import torch

    from sit_vit5.codecs.autoencoder import NonFiniteLatents
    from sit_vit5.data.loader import from_uint8

    layout, name = job.layout, job.options.codec.name
    if not len(visit.pixels):
        return np.empty((0, layout.mirrors, *layout.moments_shape), np.float32)
    images = from_uint8(torch.from_numpy(visit.pixels).to(processes.device))  # (n, C, H, W)
    sides = [images, images.flip(-1)][: layout.mirrors]
    try:
        found = torch.stack([job.codec.moments(side) for side in sides], dim=1).cpu().numpy()
    except NonFiniteLatents as error:  # nothing of it enters the cache
        raise UserError(
            f"the codec {name} gives latents that are not finite for "
            f"{described(job, visit, error.rows)}; check the images and the autoencoder's weights"
        ) from None
    limit = np.finfo(layout.dtype).max
    large = np.flatnonzero((np.abs(found) > limit).any(axis=(1, 2, 3, 4)))
    if len(large):
        raise UserError(
            f"the codec {name} gives numbers above {limit:,.0f}, the largest of {layout.dtype}, "
            f"for {described(job, visit, large)}; use --dtype float32 and another --out"
        )
    return found


def described(job: Job, visit: Visit, rows: Sequence[int]) -> str:
    """The first images among these rows of a visit's pixels, for messages."""
    good = [index for index in visit.indices if index not in visit.bad]
    names = [job.source.describe(good[row]) for row in rows[:NAMED]]
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return ", ".join(names) + more


def finish(job: Job) -> None:
    """Writes the list of the images that were left out, then the index."""
    from sit_vit5.data.cache_writer import BAD_IMAGES, left_out, write_index
    from sit_vit5.utils.files import write_text

    bad = left_out(job.folder, job.layout)
    if bad:
        lines = [f"{reason}\n" for _, reason in sorted(bad.items())]
        write_text(job.folder / BAD_IMAGES, "".join(lines))
        print(f"{len(bad)} images left out, listed in {job.folder / BAD_IMAGES}")
    write_index(job.folder, job.layout, job.settings(), job.source.labels, bad)
