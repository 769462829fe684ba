"""The step-addressable loader: the image at a position is a function of (seed, position).

Position p = step * batch_size + index in the batch. Epoch e holds positions e * n to e * n + n - 1
and its own permutation, so a resumed run asks for the next step and nothing is replayed or skipped,
whatever the number of processes, workers or accumulation steps. Worker processes read ahead and end
with the process that started them.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from multiprocessing import queues, util
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sit_vit5.data import Source
from sit_vit5.data.fingerprints import RECORD, fingerprint
from sit_vit5.data.transforms import BadImage, refusal
from sit_vit5.utils import rng
from sit_vit5.utils.distributed import BatchPlan
from sit_vit5.utils.errors import UserError, brief

Item = TypeVar("Item", covariant=True)

PATIENCE = 3600.0  # seconds without an item before the disk is taken for dead
POLL = 1.0  # seconds between looks at signals and at the clock
# Bytes of a folder in which the name of a worker's socket (32 more) is legal: Linux allows 107 in
# all, macOS 103 (unix(7), sun_path).
LONGEST_SOCKET_FOLDER = 71
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# A worker needs at least its queue and its sentinel; the margin is DataLoader's own and ours.
FILES_PER_WORKER, FILES_BESIDE = 4, 16
_OUT_OF_FILES = re.compile("Too many open files|received 0 items of ancdata")
_END = object()


class ByKey(Protocol[Item]):
    """What gives items by key; pickled into the workers."""

    def __getitem__(self, key: Hashable) -> Item: ...


def read_ahead(
    items: ByKey[Item],
    keys: Iterable[Hashable],
    *,
    workers: int,
    patience: float = PATIENCE,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Item]:
    """The items of these keys in this order; with 0 workers they are made when asked for.

    Where there is a GPU the tensors of an item with a method `pin_memory` are pinned. A UserError
    comes out as it is; a failure of the system, a worker that was killed, or no item for `patience`
    seconds become one. stopped: asked while an item is waited for; the stream then ends.
    """
    before = set(multiprocessing.active_children())
    stream = _start(items, keys, workers)
    ours = set(multiprocessing.active_children()) - before
    failed = True
    try:
        while (item := _next(stream, patience if workers else None, stopped)) is not _END:
            if isinstance(item, UserError):
                raise item
            yield item
    except GeneratorExit:
        failed = False
        raise
    except (RuntimeError, OSError, EOFError) as error:
        raise _in_words(error, ours) from None
    finally:
        if failed:  # workers that hang do not end when asked to
            _kill(ours)
        del stream  # ends the workers now; a kept traceback would keep them alive
        _kill(ours)


def _kill(workers: set[multiprocessing.Process]) -> None:
    for worker in workers:
        worker.kill()


def _start(items: ByKey, keys: Iterable[Hashable], workers: int) -> Iterator:
    """The running loader."""
    if workers:
        _check_open_files(workers)
        _make_socket_folder()
    with _deaths_told_by_next(), warnings.catch_warnings():
        # More workers than cores are the user's word.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        stream = DataLoader(
            _ErrorsAsValues(items),
            sampler=keys,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_stand_apart,
            timeout=POLL if workers else 0,
        )
        try:
            return iter(stream)
        except OSError as error:  # no process or memory is left
            raise UserError(
                f"cannot start {workers} loader processes: {brief(error)}; use fewer --data.workers"
            ) from None


def _next(stream: Iterator, patience: float | None, stopped: Callable[[], bool]) -> object:
    """The next item, or `_END`. patience None: the item is made here and takes what it takes."""
    started = time.monotonic()
    while not stopped():
        try:
            return next(stream, _END)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
        if time.monotonic() - started > patience:
            raise UserError(
                f"no data for {patience / 60:.3g} minutes: the loader processes hang; check that "
                "the disk or network behind the data answers"
            )
    return _END


def _in_words(error: Exception, workers: set[multiprocessing.Process]) -> Exception:
    """A UserError for a failure of the system; a bug stays as it is and keeps its traceback."""
    text = brief(error)
    out_of_files = any(worker.exitcode == errno.EMFILE for worker in workers)
    if out_of_files or getattr(error, "errno", None) == errno.EMFILE or _OUT_OF_FILES.search(text):
        return _too_many_files()
    if isinstance(error, (ConnectionError, EOFError)) or text.startswith("DataLoader worker"):
        # A killed worker: DataLoader's own word, or a pipe that broke while it was read.
        return UserError(f"a loader process died: {text}; use fewer --data.workers")
    return error


def _too_many_files() -> UserError:
    return UserError(
        "too many open files; use fewer --data.workers, or raise the limit of the shell (ulimit -n)"
    )


def _check_open_files(workers: int) -> None:
    """Refuses more workers than files can be opened for: DataLoader would leave half of them."""
    opened = []
    try:
        for _ in range(FILES_PER_WORKER * workers + FILES_BESIDE):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        raise _too_many_files() from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _make_socket_folder() -> None:
    """Makes the folder of the workers' sockets, by which tensors are handed over.

    It lies in TMPDIR, unless that is too long for a socket's name.
    """
    before = tempfile.tempdir
    try:
        if os.name != "nt" and len(os.fsencode(tempfile.gettempdir())) > LONGEST_SOCKET_FOLDER:
            tempfile.tempdir = next(
                (folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK)),
                tempfile.tempdir,
            )
        folder = util.get_temp_dir()  # inherited by the workers
    except OSError as error:
        raise UserError(
            f"the loader processes need a folder for temporary files: {brief(error)}; set TMPDIR, "
            "or use --data.workers 0"
        ) from None
    finally:
        tempfile.tempdir = before
    if os.name != "nt" and len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER + 14:
        raise UserError(
            f"the folder of temporary files {folder} is too long for the loader processes' sockets;"
            f" set TMPDIR to one of at most {LONGEST_SOCKET_FOLDER} bytes, or use --data.workers 0"
        )


@contextmanager
def _deaths_told_by_next() -> Iterator[None]:
    """Takes back the handler that torch sets: it raises wherever the main process happens to be."""
    mine = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if mine else None
    yield
    if mine:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


class _ErrorsAsValues(Dataset):
    """Carries errors of the user and of the system out of a worker as a UserError; DataLoader would
    wrap them in a traceback."""

    def __init__(self, items: ByKey):
        self.items = items

    def __getitem__(self, key: Hashable) -> object:
        try:
            return self.items[key]
        except UserError as error:
            return error
        except OSError as error:  # a disk that fails, a file that is gone
            if error.errno == errno.EMFILE:
                return _too_many_files()
            return UserError(f"the data cannot be read: {brief(error)}")
        except MemoryError:
            return UserError(
                "no memory for a batch of data; use fewer --data.workers or a smaller batch"
            )


def _stand_apart(worker: int) -> None:
    """A signal to the trainer's group is the trainer's business: it saves, then ends its workers.

    Reset first: a forked worker inherits the trainer's handlers and would not end when told to.
    """
    del worker
    queues.Queue._on_queue_feeder_error = staticmethod(_die)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):  # Slurm sends it to workers too
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()


def _die(error: Exception, item: object) -> NoReturn:
    """In a worker: without its death an item that cannot be sent would be waited for."""
    del item
    print(f"error: a loader process cannot send: {brief(error)}", file=sys.stderr, flush=True)
    os._exit(errno.EMFILE if getattr(error, "errno", None) == errno.EMFILE else 1)


@dataclass
class Visit:
    """One batch. pixels: uint8 (n, H, W, C) of those of `indices` that can be decoded; bad: why
    the others cannot, by index. records: fingerprints of the former, (n,), if they are wanted."""

    indices: Sequence[int]
    pixels: np.ndarray
    records: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)


def iterate_images(
    source: Source,
    batches: Sequence[Sequence[int]],
    *,
    workers: int,
    fingerprints: bool = False,
) -> Iterator[Visit]:
    """The batches of indices one after the other."""
    items = _Visits(source, batches, fingerprints=fingerprints)
    return read_ahead(items, range(len(batches)), workers=workers)


class _Visits:
    def __init__(self, source: Source, batches: Sequence[Sequence[int]], *, fingerprints: bool):
        self.source, self.batches, self.fingerprints = source, batches, fingerprints

    def __getitem__(self, number: int) -> Visit:
        visit = Visit(self.batches[number], np.empty((0,), np.uint8), np.empty((0,), RECORD))
        pixels, records = [], []
        for index in visit.indices:
            try:
                pixels.append(self.source.load(index)[0])
                if self.fingerprints:
                    records.append(fingerprint(self.source, index))
            except BadImage as error:
                visit.bad[index] = str(error)
        if pixels:
            visit.pixels = np.stack(pixels)
        if records:
            visit.records = np.stack(records)
        return visit


class Posterior(Protocol):
    """The half of a codec that a latent cache leaves to do."""

    draws_noise: bool

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch. images: fp32 (b, C, H, W) in [-1, 1], or latents; labels: int64 (b,)."""

    images: Tensor
    labels: Tensor
    bad_images: tuple[str, ...] = ()

    def pin_memory(self) -> Batch:
        """Called by DataLoader where there is a GPU: pinned images travel beside the work."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


class StepLoader:
    """Micro-batches by (step, micro), alone or as an endless prefetched stream.

    posterior: turns cached moments into latents; for a source of moments only.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        *,
        seed: int,
        horizontal_flip: bool = False,
        on_bad_image: str = "error",
        workers: int = 0,
        posterior: Posterior | None = None,
    ):
        if len(source) < plan.batch_size:
            raise UserError(
                f"{len(source)} images are fewer than batch_size {plan.batch_size}; "
                "lower batch_size or add images"
            )
        self.source, self.plan, self.seed = source, plan, seed
        self.horizontal_flip, self.skip_bad = horizontal_flip, on_bad_image == "skip"
        self.workers, self.posterior = workers, posterior
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def indices(self, step: int, places: range) -> np.ndarray:
        """Indices in the source of the images at these places of a step's batch."""
        positions = step * self.plan.batch_size + np.arange(places.start, places.stop)
        epochs, places_in_epoch = np.divmod(positions, len(self.source))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):  # one, or two where an epoch ends within the batch
            here = epochs == epoch
            found[here] = self._order(int(epoch))[places_in_epoch[here]]
        return found

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        """Micro-batch `micro` of this rank at `step`; key = (step, micro)."""
        step, micro = key
        places = self.plan.indices(micro)
        indices, mirrored = self.indices(step, places), self._flips(step, places)
        if self.source.kind == "moments":
            return self._latents(indices, mirrored, step, places)
        return self._images(indices, mirrored)

    def steps(
        self,
        first_step: int,
        *,
        patience: float = PATIENCE,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Batch]]:
        """The micro-batches of first_step, first_step + 1, ... without end, read ahead.

        patience, in seconds, and stopped: as in `read_ahead`.
        """
        count = self.plan.accumulation
        keys = _keys(first_step, count)
        stream = read_ahead(self, keys, workers=self.workers, patience=patience, stopped=stopped)
        try:
            while len(batches := list(islice(stream, count))) == count:
                yield batches
        finally:
            stream.close()

    def not_finite(self, step: int) -> list[str]:
        """Cached images of a step's batch, in words, whose latents as trained on are not finite.

        Of all ranks; to be asked when a step went wrong.
        """
        if self.source.kind != "moments":
            return []  # uint8 images, and codecs that refuse such latents
        places = range(self.plan.batch_size)
        indices, mirrored = self.indices(step, places), self._flips(step, places)
        latents = self._latents(indices, mirrored, step, places).images
        bad = ~latents.isfinite().flatten(1).all(dim=1).numpy()
        return [self.source.describe(int(index)) for index in indices[bad]]

    def _permutation(self, epoch: int) -> np.ndarray:
        return rng.generator(self.seed, "order", epoch).permutation(len(self.source))

    def _flips(self, step: int, places: range) -> np.ndarray:
        if not self.horizontal_flip:
            return np.zeros(len(places), bool)
        numbers = rng.uniform(self.seed, "flip", self.plan.batch_size, step=step)
        return numbers[places.start : places.stop] < 0.5

    def _latents(
        self, indices: np.ndarray, mirrored: np.ndarray, step: int, places: range
    ) -> Batch:
        """A fresh draw of every posterior, with the noise that encoding now would take."""
        moments, labels = self.source.batch(indices, mirrored)
        noise = None
        if self.posterior.draws_noise:
            noise = posterior_noise(self.seed, self.source.item_shape, step, places)
        latents = self.posterior.latents(torch.from_numpy(moments), noise)
        return Batch(latents, torch.from_numpy(labels))

    def _images(self, indices: np.ndarray, mirrored: np.ndarray) -> Batch:
        bad: list[str] = []
        items, labels = zip(
            *(self._load(int(i), bool(m), bad) for i, m in zip(indices, mirrored, strict=True)),
            strict=True,
        )
        pixels = torch.from_numpy(np.ascontiguousarray(np.stack(items)))
        return Batch(from_uint8(pixels), torch.tensor(labels), tuple(bad))

    def _load(self, index: int, mirror: bool, bad: list[str]) -> tuple[np.ndarray, int]:
        """The item at index, or the next that can be decoded where bad images are skipped."""
        for offset in range(len(self.source)):
            try:
                return self.source.load((index + offset) % len(self.source), mirror=mirror)
            except BadImage as error:
                if not self.skip_bad:
                    raise refusal(error) from None
                bad.append(str(error))
        raise UserError("no image of the data set can be decoded")


def posterior_noise(
    seed: int, latent_shape: tuple[int, int, int], step: int, places: Iterable[int]
) -> Tensor:
    """The standard normal noise of an autoencoder's draws at these places of a step's batch."""
    return torch.from_numpy(rng.normal(seed, "posterior", latent_shape, step=step, indices=places))


def from_uint8(pixels: Tensor) -> Tensor:
    """What codecs encode: uint8 (B, H, W, C) -> fp32 (B, C, H, W) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _keys(step: int, accumulation: int) -> Iterator[tuple[int, int]]:
    while True:
        for micro in range(accumulation):
            yield step, micro
        step += 1
