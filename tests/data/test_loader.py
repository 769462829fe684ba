"""Which image stands where."""

from __future__ import annotations

import errno
import multiprocessing
import os
import tempfile
import time
from itertools import islice
from multiprocessing import process
from pathlib import Path

import numpy as np
import pytest
import torch

from sit_vit5.data.loader import Batch, StepLoader
from sit_vit5.data.sources import ImageFolder
from sit_vit5.utils.distributed import BatchPlan
from sit_vit5.utils.errors import UserError


class Numbers:
    """A source whose item i shows the number i."""

    kind = "images"
    class_names = ("even", "odd")
    item_shape = (1, 1, 1)

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, *, mirror: bool = False):
        return np.full((1, 1, 1), index + 100 * mirror, np.uint8), index % 2


def loader(count=10, batch=4, accumulation=1, processes=1, rank=0, **options) -> StepLoader:
    plan = BatchPlan(batch, accumulation, processes, rank)
    return StepLoader(Numbers(count), plan, seed=0, **options)


def shown(batch) -> list[int]:
    return ((batch.images + 1) * 127.5).round().int().flatten().tolist()


def test_every_epoch_shows_every_image_once_in_another_order():
    numbers = loader(batch=10).indices(0, range(30)).tolist()
    epochs = [numbers[0:10], numbers[10:20], numbers[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_step_can_be_asked_for_without_the_ones_before():
    straight = [shown(batch) for (batch,) in islice(loader().steps(0), 9)]
    assert [shown(batch) for (batch,) in islice(loader().steps(5), 4)] == straight[5:9]
    assert shown(loader()[(7, 0)]) == straight[7]


def test_the_order_does_not_depend_on_processes_or_accumulation():
    whole = shown(loader()[(3, 0)])
    parts = []
    for micro in range(2):
        for rank in range(2):
            parts += shown(loader(accumulation=2, processes=2, rank=rank)[(3, micro)])
    assert parts == whole


def test_worker_processes_change_nothing():
    plain = [shown(batch) for (batch,) in islice(loader(workers=0).steps(0), 6)]
    assert [shown(batch) for (batch,) in islice(loader(workers=2).steps(0), 6)] == plain


def test_half_of_the_visits_are_mirrored_and_always_the_same_ones():
    flipped = loader(count=50, batch=50, horizontal_flip=True)
    first = shown(flipped[(0, 0)])
    assert first == shown(loader(count=50, batch=50, horizontal_flip=True)[(0, 0)])
    mirrored = sum(value >= 100 for value in first)
    assert 15 <= mirrored <= 35
    other = shown(flipped[(1, 0)])
    assert [v >= 100 for v in first] != [v >= 100 for v in other]
    assert max(shown(loader(count=50, batch=50)[(0, 0)])) < 100


def test_images_become_fp32_between_minus_one_and_one():
    batch = loader(count=256, batch=256)[(0, 0)]
    assert batch.images.dtype == torch.float32
    assert (batch.images.min(), batch.images.max()) == (-1, 1)
    assert batch.labels.tolist() == [value % 2 for value in shown(batch)]


@pytest.mark.parametrize(
    ("count", "fits"), [(0, False), (1, False), (3, False), (4, True), (5, True)]
)
def test_fewer_images_than_a_batch_are_refused(count, fits):
    if fits:
        assert len(loader(count=count)[(0, 0)].labels) == 4
    else:
        with pytest.raises(UserError, match=f"{count} images are fewer than batch_size 4"):
            loader(count=count)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_stops_with_its_name_or_is_replaced_and_listed(image_folder, workers):
    bad = image_folder / "cat" / "03.png"
    bad.write_bytes(bad.read_bytes()[:60])
    plan = BatchPlan(24)

    def build(on_bad_image: str) -> StepLoader:
        return StepLoader(
            ImageFolder(image_folder, 8), plan, seed=0, on_bad_image=on_bad_image, workers=workers
        )

    with pytest.raises(UserError, match=r"03.png: cannot be decoded.*on-bad-image skip") as error:
        next(build("error").steps(0))
    assert "\n" not in str(error.value)
    (batch,) = next(build("skip").steps(0))
    assert len(batch.images) == 24
    assert len(batch.bad_images) == 1 and "03.png" in batch.bad_images[0]


def test_a_folder_of_only_bad_images_ends(image_folder):
    for file in image_folder.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no image of the data set"):
        StepLoader(ImageFolder(image_folder, 8), BatchPlan(4), seed=0, on_bad_image="skip")[(0, 0)]


def test_a_killed_worker_interrupts_nothing_but_the_next_read():
    stream = loader(workers=1).steps(0)
    next(stream)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    time.sleep(0.5)  # a step: torch's own handler raises RuntimeError here
    with pytest.raises(UserError, match="a loader process died: "):
        for _ in range(20):
            next(stream)


def test_a_killed_worker_gets_one_line_and_a_bug_keeps_its_traceback():
    stream = loader(workers=1).steps(0)
    next(stream)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    with pytest.raises(UserError, match="a loader process died: ") as error:
        for _ in range(20):  # what was read ahead comes first
            next(stream)
    assert "\n" not in str(error.value)

    broken = loader(workers=0)
    broken.source.load = lambda index, mirror: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="size|shape") as error:
        next(broken.steps(0))
    assert not isinstance(error.value, UserError)


class Stuck(Numbers):
    """A source on a disk that does not answer."""

    def load(self, index: int, *, mirror: bool = False):
        time.sleep(1000)


class Failing(Numbers):
    """A source on a disk that fails in one way."""

    def __init__(self, error: Exception):
        super().__init__(10)
        self.error = error

    def load(self, index: int, *, mirror: bool = False):
        raise self.error


def test_a_disk_that_does_not_answer_ends_the_wait(monkeypatch):
    monkeypatch.setattr("sit_vit5.data.loader.POLL", 0.1)
    stream = StepLoader(Stuck(10), BatchPlan(4), seed=0, workers=2).steps(0, patience=0.3)
    with pytest.raises(UserError, match="no data for 0.005 minutes: the loader processes hang"):
        next(stream)
    wait_for_no_children()


def test_a_signal_ends_the_wait_for_a_stuck_disk(monkeypatch):
    monkeypatch.setattr("sit_vit5.data.loader.POLL", 0.1)
    asked = iter([False, False, True])
    stream = StepLoader(Stuck(10), BatchPlan(4), seed=0, workers=2).steps(
        0, stopped=lambda: next(asked)
    )
    assert next(stream, "the end") == "the end"
    wait_for_no_children()


def wait_for_no_children() -> None:
    for child in multiprocessing.active_children():
        child.join(timeout=30)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EIO, "Input/output error"), "the data cannot be read: .*Input/output error"),
        (OSError(errno.EMFILE, "Too many"), "too many open files; use fewer --data.workers"),
        (MemoryError(), "no memory for a batch"),
    ],
)
def test_a_failure_of_the_system_is_one_line(workers, error, message):
    stream = StepLoader(Failing(error), BatchPlan(4), seed=0, workers=workers).steps(0)
    with pytest.raises(UserError, match=message):
        next(stream)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no socket files")
def test_a_long_temporary_folder_reaches_the_workers(tmp_path, monkeypatch):
    this = process.current_process()
    fresh = {key: value for key, value in this._config.items() if key != "tempdir"}
    monkeypatch.setattr(this, "_config", dict(fresh))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    Path(tempfile.tempdir).mkdir()
    plain = [shown(batch) for (batch,) in islice(loader().steps(0), 3)]
    assert [shown(batch) for (batch,) in islice(loader(workers=1).steps(0), 3)] == plain
    assert len(tempfile.gettempdir()) > 100
    monkeypatch.setattr(this, "_config", dict(fresh))
    monkeypatch.setattr("sit_vit5.data.loader.SHORT_FOLDERS", ())
    with pytest.raises(UserError, match="is too long for the loader processes' sockets; set TMPDI"):
        next(loader(workers=1).steps(0))


def test_more_workers_than_open_files_are_refused():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        with pytest.raises(UserError, match="too many open files; use fewer --data.workers"):
            next(loader(workers=16).steps(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not multiprocessing.active_children()


def test_an_item_that_cannot_be_sent_ends_its_worker(monkeypatch, capfd):
    def unsendable(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Batch, "__reduce__", unsendable)
    with pytest.raises(UserError, match="a loader process died: "):
        next(loader(workers=1).steps(0))
    assert "a loader process cannot send: [Errno 28] No space left" in capfd.readouterr().err
