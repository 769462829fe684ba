"""Reference of a data set, sharded over processes; an interrupted run continues.

REF.npz.parts/settings.json     settings; a run with others is refused
REF.npz.parts/kept.npy          the images stored in REF.npz, filled by index
REF.npz.parts/00000.npz         statistics of images 0 .. CHUNK - 1, and so on
REF.npz                         written last; the parts are then removed

A chunk's statistics do not depend on the process, and chunks are merged in their order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sit_vit5.config import MakeReferenceConfig
from sit_vit5.data import Source
from sit_vit5.data.loader import iterate_images
from sit_vit5.evaluation.inputs import archive_of, hash_of, open_image_set, versions
from sit_vit5.evaluation.real_sets import (
    good_indices,
    image_shape,
    open_extractor,
    open_source,
    refuse_image,
    visit_images,
)
from sit_vit5.metrics.accumulator import extract_statistics
from sit_vit5.metrics.features import POOL, SPATIAL, Extractor
from sit_vit5.metrics.image_sets import ImageSet, equal_channels, with_channels
from sit_vit5.metrics.reference import (
    KINDS,
    NEGATIVE,
    ReferenceFile,
    read_facts,
    read_reference,
    write_reference,
)
from sit_vit5.metrics.statistics import Gaussian, Statistics
from sit_vit5.utils import rng
from sit_vit5.utils.arrays import allocate_npy, check_npz, find_member, map_npy, members, write_npz
from sit_vit5.utils.distributed import Processes, agree, gather
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import (
    check_output,
    check_plain,
    check_same,
    check_space,
    lock,
    parse_json,
    read_json,
    remove_own,
    write_json,
)
from sit_vit5.utils.progress import progress_bar

CHUNK = 32_768  # images; ImageNet has 40 chunks, of which each takes 67 MB
CROP = "ADM centre crop (sit_vit5.data.transforms.center_crop), not mirrored"
SETTINGS, KEPT, GOOD = "settings.json", "kept.npy", "good_kept.npy"
_FILES = (SETTINGS, KEPT, GOOD, "[0-9][0-9][0-9][0-9][0-9].npz", "*.partial", ".lock")


@dataclass(frozen=True)
class Job:
    """Reference to compute. kept: sorted indices of the images in the file, (K,); channels: 1 if
    all images are grey."""

    options: MakeReferenceConfig
    source: Source
    extractor: Extractor
    kept: np.ndarray
    channels: int

    @property
    def out(self) -> Path:
        """The reference."""
        return Path(self.options.out)

    @property
    def folder(self) -> Path:
        """Folder of the parts until the reference is complete."""
        return self.out.with_name(self.out.name + ".parts")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs whose statistics are computed."""
        return tuple(name for name in self.extractor.outputs if name in (POOL, SPATIAL))

    @property
    def chunks(self) -> list[range]:
        """Indices of each chunk."""
        count = len(self.source)
        return [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]

    def chunk_file(self, number: int) -> Path:
        """Path of a chunk's statistics."""
        return self.folder / f"{number:05d}.npz"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return (*image_shape(self.source)[:2], self.channels)

    @property
    def remedy(self) -> str:
        """Remedy for damaged parts, for error messages."""
        return f"remove {self.folder} and run the same command again"

    def map_kept(self, mode: str = "r") -> np.memmap:
        """Map the images stored in the file, uint8 (K, H, W, C)."""
        shape = (len(self.kept), *self.image_shape)
        return map_npy(self.folder / KEPT, np.uint8, shape, mode=mode, remedy=self.remedy)

    def kept_of(self, chunk: range) -> slice:
        """Slice of a chunk within the stored images."""
        return slice(*np.searchsorted(self.kept, (chunk.start, chunk.stop)).tolist())

    def settings(self) -> dict:
        """Settings that determine the reference, as JSON values."""
        return {
            "data": self.source.identity,
            "image_shape": list(self.image_shape),
            "extractor": self.extractor.identity,
            "kept": {"count": len(self.kept), "seed": self.options.seed},
            "chunk": CHUNK,
        }


@dataclass(frozen=True)
class ChunkFacts:
    """Facts beside a chunk's statistics. sha256: of its pixels; kept_sha256: of those that
    are kept; bad: why images cannot be decoded, by index."""

    sha256: str
    kept_sha256: str
    bad: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Statistics and facts of a complete chunk. statistics: by output."""

    statistics: dict[str, Statistics]
    facts: ChunkFacts


def make_reference(options: MakeReferenceConfig, processes: Processes) -> Path:
    """Compute missing chunks, each process its share, write the reference, and return its path."""
    out = Path(options.out)
    check_output(out)
    if out.exists() and not _made_here(out):
        raise UserError(f"{out} exists; choose another --out or remove it")
    source = open_source(options, options.data)
    job = Job(
        options,
        source,
        open_extractor(options),
        choose_kept(len(source), options.num_images_kept, options.seed),
        find_channels(source, options, processes),
    )
    if out.exists():
        with agree(processes):
            if processes.is_main:
                check_complete(job)
        return out
    if processes.is_main and source.notes:
        print(*source.notes, sep="\n")
    with ExitStack() as held:
        with agree(processes):
            if processes.is_main:
                if job.folder.is_symlink():
                    check_plain(job.folder)
                held.enter_context(lock(job.folder, "evaluate/reference.py"))
                prepare(job)
        missing = [n for n in range(len(job.chunks)) if not job.chunk_file(n).is_file()]
        processes.wait()  # every process has listed the missing chunks before one finishes
        make_chunks(job, missing[processes.rank :: processes.count], processes)
        processes.wait()
        with agree(processes):
            if processes.is_main:
                finish(job)
    return out


def find_channels(source: Source, options: MakeReferenceConfig, processes: Processes) -> int:
    """Return 1 if all images are grey, else the stored channels; stop at the first in colour."""
    channels, size = image_shape(source)[2], options.batch_size
    with agree(processes):
        if processes.is_main and channels > 1:
            batches = [range(len(source))[s : s + size] for s in range(0, len(source), size)]
            found = iterate_images(source, batches, workers=options.workers)
            if all(equal_channels(visit.pixels) for visit in found if len(visit.pixels)):
                channels = 1
    return gather([channels], processes)[0]


def choose_kept(count: int, wanted: int, seed: int) -> np.ndarray:
    """Sorted indices of a random choice of `wanted` images, or of all, if there are fewer."""
    order = rng.generator(seed, "reference images").permutation(count)
    return np.sort(order[:wanted])


def _made_here(path: Path) -> bool:
    """True if a file is a reference by this command."""
    try:
        return bool(read_facts(path))
    except UserError:
        return False


def check_complete(job: Job) -> None:
    """Refuse a reference that is damaged or made with other settings; remove parts left
    by a killed run."""
    facts = read_facts(job.out)
    before = {key: facts.get(key) for key in job.settings()}
    check_same(job.out, before, job.settings(), what="a reference made")
    check_npz(job.out, remedy="remove it and run the same command again")
    remove_own(job.folder, _FILES)
    print(f"complete already, made with the same settings: {job.out}")


def prepare(job: Job) -> None:
    """Refuse parts of another reference and a full disk; allocate the file of its images."""
    begun = any(job.folder.glob("[0-9]*.npz"))  # else other settings lose nothing
    if begun:
        before = read_json(job.folder / SETTINGS, remedy=job.remedy)
        check_same(job.folder, before, job.settings(), what="parts of a reference")
    shape = (len(job.kept), *job.image_shape)
    # Twice: as parts and in the file. Statistics: 2,048 and 2,023 squared numbers of 8 bytes.
    need = 2 * int(np.prod(shape)) + (len(job.chunks) + 1) * 67 * 10**6
    check_space(job.folder, need, "reference and its parts", use="choose another --out")
    if not begun:
        write_json(job.folder / SETTINGS, job.settings())
        allocate_npy(job.folder / KEPT, np.uint8, shape)


def make_chunks(job: Job, numbers: list[int], processes: Processes) -> None:
    """Compute statistics and stored images of these chunks; read ahead across chunks."""
    size = job.options.batch_size
    batches = [
        job.chunks[number][start : start + size]
        for number in numbers
        for start in range(0, len(job.chunks[number]), size)
    ]
    total = sum(map(len, batches))
    stream = visit_images(job.source, batches, job.options)
    title = f"process 1 of {processes.count}" if processes.count > 1 else "reference"
    with progress_bar(total, unit="image", title=title, shown=processes.is_main) as bar:
        for number in numbers:
            chunk = _ChunkStream(job, len(job.chunks[number]), stream, bar)
            found = extract_statistics(
                job.extractor,
                chunk.pixels(),
                title=f"{job.options.data}, images {job.chunks[number]}",
                total=chunk.left,
                outputs=job.outputs,
                shown=False,
            )
            chunk.images.flush()  # before the chunk counts as made
            write_npz(job.chunk_file(number), _packed(found) | chunk.facts())


class _ChunkStream:
    """Stream of a chunk's images to the extractor: all hashed, the chosen ones stored."""

    def __init__(self, job: Job, count: int, stream: Iterator, bar: tqdm):
        self.job, self.left, self.stream, self.bar = job, count, stream, bar
        self.images = job.map_kept("r+")
        self.digest, self.kept_digest, self.bad = hashlib.sha256(), hashlib.sha256(), {}

    def pixels(self) -> Iterator[np.ndarray]:
        """uint8 (n, H, W, C), batch by batch."""
        while self.left:
            visit = next(self.stream)
            self.left -= len(visit.indices)
            self.bad |= visit.bad
            self.bar.update(len(visit.indices))
            if len(visit.pixels):
                pixels = with_channels(visit.pixels, self.job.channels, name=self.job.options.data)
                self.digest.update(np.ascontiguousarray(pixels))
                self._keep(good_indices(visit), pixels)
                yield pixels

    def _keep(self, indices: np.ndarray, pixels: np.ndarray) -> None:
        chosen = np.isin(indices, self.job.kept)
        self.images[np.searchsorted(self.job.kept, indices[chosen])] = pixels[chosen]
        self.kept_digest.update(np.ascontiguousarray(pixels[chosen]))

    def facts(self) -> dict[str, np.ndarray]:
        """Facts of the chunk as arrays."""
        facts = ChunkFacts(self.digest.hexdigest(), self.kept_digest.hexdigest(), self.bad)
        return {"facts": np.array(json.dumps(asdict(facts)))}


def _packed(found: dict[str, Statistics]) -> dict[str, np.ndarray]:
    return {
        f"{output}.{name}": np.asarray(getattr(statistics, name))
        for output, statistics in found.items()
        for name in ("count", "mean", "scatter")
    }


def read_chunk(job: Job, number: int) -> Chunk:
    """Read a complete chunk, possibly of an earlier run. Refuse one that does not fit the job."""
    path, images = job.chunk_file(number), job.chunks[number]
    try:
        there = members(path)
        stored = {key: find_member(path, member).read() for key, member in there.items()}
        facts = parse_json(str(stored["facts"]), ChunkFacts, source=f"facts of {path}")
        left = len(images) - len(facts.bad)
        if not facts.bad.keys() <= set(images):
            raise ValueError("it lists images of another chunk")
        statistics = {output: _unpacked(stored, output, left) for output in job.outputs}
    except (UserError, ValueError, KeyError) as error:
        raise UserError(f"{path} is no part of this reference: {error}; {job.remedy}") from None
    return Chunk(statistics, facts)


def _unpacked(stored: dict[str, np.ndarray], output: str, images: int) -> Statistics:
    """Statistics of one output. images: their required number."""
    count, mean, scatter = (stored[f"{output}.{name}"] for name in ("count", "mean", "scatter"))
    if count.dtype.kind not in "iu" or count.shape or int(count) != images:
        raise ValueError(f"{output}.count is not {images}")
    fits = mean.ndim == 1 and scatter.shape == mean.shape * 2
    if not fits or not all(
        array.dtype == np.float64 and np.isfinite(array).all() for array in (mean, scatter)
    ):
        raise ValueError(f"{output}.mean and {output}.scatter are no statistics")
    return Statistics(images, mean, scatter)


def finish(job: Job) -> None:
    """Merge the chunks in their order, write the reference and remove the parts."""
    whole: dict[str, Statistics] = {}
    digest, bad = hashlib.sha256(), {}
    for number, images in enumerate(job.chunks):
        chunk = read_chunk(job, number)
        for output, part in chunk.statistics.items():
            if len(part.mean) != len(whole.get(output, part).mean):
                raise UserError(
                    f"{job.chunk_file(number)} has another number of features; {job.remedy}"
                )
            whole[output] = whole[output].merge(part) if output in whole else part
        digest.update(chunk.facts.sha256.encode())
        bad |= chunk.facts.bad
        _check_kept(job, images, chunk.facts)
    if bad and job.options.on_bad_image == "error":  # parts were made with skip
        raise refuse_image(min(bad.values()))
    images, kept = _without(job, bad)
    named = bool(job.source.class_names)
    write_reference(
        job.out,
        pool=whole[POOL],
        spatial=whole.get(SPATIAL),
        images=images,
        labels=job.source.labels[kept] if named else None,
        facts={
            **job.settings(),
            "on_bad_image": job.options.on_bad_image,
            "count": whole[POOL].count,
            "bad_images": len(bad),
            "crop": CROP,
            "class_names": list(job.source.class_names),
            "notes": list(job.source.notes),
            "pixels_sha256": digest.hexdigest(),
            "versions": versions(),
        },
    )
    remove_own(job.folder, _FILES)


def _check_kept(job: Job, images: range, facts: ChunkFacts) -> None:
    """Refuse stored images that are not those of the chunk, e.g. zeros of an interrupted copy."""
    place = job.kept_of(images)
    good = ~np.isin(job.kept[place], list(facts.bad))
    if hashlib.sha256(job.map_kept()[place][good]).hexdigest() != facts.kept_sha256:
        raise UserError(f"{job.folder / KEPT} is damaged: other images; {job.remedy}")


def _without(job: Job, bad: dict[int, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored images and their indices, without those that cannot be decoded."""
    images = job.map_kept()
    good = np.flatnonzero(~np.isin(job.kept, list(bad)))
    if not len(good):
        raise UserError("no image that was to be kept can be decoded; use another --seed")
    if len(good) == len(job.kept):
        return images, job.kept
    # Not in place: an interrupted run would leave half of it moved.
    chosen, shape = job.folder / GOOD, (len(good), *images.shape[1:])
    allocate_npy(chosen, np.uint8, shape)
    rows = map_npy(chosen, np.uint8, shape, mode="r+", remedy=job.remedy)
    for place, row in enumerate(good):
        rows[place] = images[row]
    return rows, job.kept[good]


# key -> what it is for
PURPOSES = {
    "mu": "FID: mean of the features of the whole data set",
    "sigma": "FID: covariance of the same",
    "mu_s": "sFID: mean of the spatial features of the whole data set",
    "sigma_s": "sFID: covariance of the same",
    "arr_0": "precision, recall, KID: some of the images",
    "arr_1": "class numbers of the images (ADM)",
    "labels": "class numbers of the images",
    "facts": "how the file was made",
}


def inspect(text: str) -> tuple[str, bool]:
    """Return a description, and True if the statistics are sound."""
    path = archive_of(text)
    if path.suffix.lower() != ".npz" or not path.is_file():
        return describe_images(open_image_set(text), hash_of(text)), True
    reference = read_reference(path)
    lines = [*describe_file(reference), ""]
    if reference.images is not None:
        lines.append(_images_line(reference.images))
    sound = True
    for name, gaussian in (("mu, sigma", reference.pool), ("mu_s, sigma_s", reference.spatial)):
        if gaussian is not None:
            said, good = check_gaussian(gaussian)
            lines.append(f"{name}: {said}")
            sound &= good
    return "\n".join(lines), sound


def describe_file(reference: ReferenceFile) -> list[str]:
    """Lines on every array with its purpose, the kind of file, its hash and its provenance."""
    rows = [
        (info.described.split(" of ")[0], f"{info.dtype} {info.shape}")
        for info in (find_member(reference.path, m) for m in members(reference.path).values())
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [
        f"{reference.path}",
        f"{reference.kind}: {KINDS[reference.kind]}",
        f"sha256 {reference.sha256}",
        "",
        *(
            f"  {key:<{widths[0]}}  {what:<{widths[1]}}  {PURPOSES.get(key, 'not used here')}"
            for key, what in rows
        ),
        *(["", *_facts(reference.facts)] if reference.facts else []),
    ]


def _facts(facts: dict, prefix: str = "") -> list[str]:
    """`name value` of each fact; of a long list its length."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += _facts(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > 12:
            lines.append(f"  {prefix}{key}: {len(value)} of them, {value[0]} ... {value[-1]}")
        else:
            lines.append(f"  {prefix}{key}: {value}")
    return lines


def describe_images(images: ImageSet, sha256: str | None) -> str:
    """Error for a set without statistics."""
    return "\n".join([images.name, *([f"sha256 {sha256}"] if sha256 else []), _images_line(images)])


def _images_line(images: ImageSet) -> str:
    height, width, channels = images.shape
    formats = ", ".join(f"{count} {name}" for name, count in images.formats.items())
    where = f" in {images.folders} folders: {formats}" if formats else ""
    return f"{images.count:,} images, {width}x{height} pixels, {channels} channels{where}"


def check_gaussian(gaussian: Gaussian) -> tuple[str, bool]:
    """Check a covariance: symmetric and finite by `read_gaussian`, so no eigenvalue
    below zero beyond rounding."""
    values = np.linalg.eigvalsh(gaussian.covariance)
    largest, least = float(values[-1]), float(values[0])
    rank = int((values > largest * len(values) * np.finfo(np.float64).eps).sum())
    text = f"{len(values):,} features, finite, symmetric, rank {rank:,}, trace {values.sum():.6g}"
    if least < -NEGATIVE * max(largest, 0):
        return f"{text}; NOT a covariance: smallest eigenvalue {least:.3g}, damaged file?", False
    full = rank == len(values)
    why = "" if full else " (rank-deficient: few images, or features that never vary)"
    return f"{text}{why}; a covariance", True
