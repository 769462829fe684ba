"""Reading ahead by worker processes that end with the process that asked."""

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
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import queues, util
from typing import NoReturn, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from sit_vit5.errors import UserError, brief

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
