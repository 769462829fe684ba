"""Reading ahead by worker processes that end with the process that asked."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from sit_vit5.errors import UserError

Item = TypeVar("Item", covariant=True)


class ByKey(Protocol[Item]):
    """What gives items by key; pickled into the workers."""

    def __getitem__(self, key: Hashable) -> Item: ...


def read_ahead(items: ByKey[Item], keys: Iterable[Hashable], *, workers: int) -> Iterator[Item]:
    """The items of these keys in this order; with 0 workers they are made when asked for.

    Where there is a GPU the tensors of an item with a method `pin_memory` are pinned. A UserError
    comes out as it is; a worker that was killed becomes one.
    """
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
        )
        found = iter(stream)
    try:
        for item in found:
            if isinstance(item, UserError):
                raise item
            yield item
    except (RuntimeError, ConnectionError, EOFError) as error:
        # A killed worker: DataLoader's own word, or a pipe that broke while it was read.
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise  # a bug keeps its traceback
        raise UserError(
            f"a loader process died: {' '.join(str(error).split())}; use fewer --data.workers"
        ) from None
    finally:
        del found  # ends the workers now; a kept traceback would keep them alive


@contextmanager
def _deaths_told_by_next() -> Iterator[None]:
    """Takes back the handler that torch sets: it raises wherever the main process happens to be."""
    mine = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if mine else None
    yield
    if mine:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


class _ErrorsAsValues(Dataset):
    """Carries a UserError out of a worker as it is; DataLoader would wrap it in a traceback."""

    def __init__(self, items: ByKey):
        self.items = items

    def __getitem__(self, key: Hashable) -> object:
        try:
            return self.items[key]
        except UserError as error:
            return error


def _stand_apart(worker: int) -> None:
    """A signal to the trainer's group is the trainer's business: it saves, then ends its workers.

    Reset first: a forked worker inherits the trainer's handlers and would not end when told to.
    """
    del worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):  # Slurm sends it to workers too
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
