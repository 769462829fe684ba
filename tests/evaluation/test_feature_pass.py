"""The pass over images: shared among processes without a trace, and kept on the disk."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sit_vit5.evaluation import features as feature_pass
from sit_vit5.evaluation.compare import choose_metrics, describe_source, find_source
from sit_vit5.evaluation.features import FeatureCache, Pass, identity_of, read_ahead
from sit_vit5.evaluation.inputs import FolderSet
from sit_vit5.evaluation.observations import SEEN, Observing
from sit_vit5.metrics import Statistics
from sit_vit5.metrics.image_sets import array_set
from sit_vit5.utils.distributed import Processes
from sit_vit5.utils.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (23, 4, 4, 1), dtype=np.uint8)
SET = array_set("samples", IMAGES)
WANTED = {"rows": ["pool"], "statistics": ["pool", "spatial"], "title": "samples"}


class Counting:
    """Features that depend on the batch they are computed in, as a network's do in their last bits.

    calls: sizes of the batches seen.
    """

    outputs = ("pool", "spatial")

    def __init__(self, weights: str = "a"):
        self.identity = {"features": "inception", "weights_sha256": weights}
        self.calls: list[int] = []

    def __call__(self, images, outputs=("pool",)):
        self.calls.append(len(images))
        rows = images.reshape(len(images), -1) / 255 + 1e-9 * len(images)
        found = {"pool": rows, "spatial": rows[:, :3]}
        return {output: found[output] for output in outputs}


def describe(extractor: Counting, images=SET, identity: str | None = None, **options):
    options = {"batch_size": 4, **options}
    return Pass(Observing(extractor), **options).describe(images, identity=identity, **WANTED)


def on_processes(monkeypatch, count: int, images=SET):
    """What the main process gets of several, which run one after the other here, it last."""
    said: list[list] = []

    def run(rank: int):
        calls = iter(range(99))

        def gather(values, processes):
            number = next(calls)
            while len(said) <= number:
                said.append([None] * count)
            said[number][rank] = values
            return [value for given in said[number] if given is not None for value in given]

        monkeypatch.setattr(feature_pass, "gather", gather)
        monkeypatch.setattr("sit_vit5.utils.distributed.gather", lambda values, processes: values)
        processes = Processes(rank, count, torch.device("cpu"), lambda: None)
        return describe(Counting(), images, processes=processes)

    for rank in range(count - 1, 0, -1):
        assert not run(rank).rows
    return run(0)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_features_are_the_same_to_the_bit_on_any_number_of_processes(monkeypatch, processes):
    alone = describe(Counting())
    shared = on_processes(monkeypatch, processes)  # 23 images in batches of 4: 8 get none or one
    for output, rows in alone.rows.items():
        assert (rows == shared.rows[output]).all() and len(rows) == 23
    for output, found in alone.statistics.items():
        assert (found.scatter == shared.statistics[output].scatter).all()


def test_a_single_image_on_three_processes_is_seen_once(monkeypatch):
    one = array_set("one", IMAGES[:1])
    assert len(on_processes(monkeypatch, 3, one).rows["pool"]) == 1


def test_another_metric_of_the_same_images_costs_no_second_pass(tmp_path):
    cache = FeatureCache(tmp_path, 10**9)
    first, second = Counting(), Counting()
    before = describe(first, identity="x", cache=cache)
    after = describe(second, identity="x", cache=cache)
    assert first.calls == [4, 4, 4, 4, 4, 3] and second.calls == []
    assert (before.rows["pool"] == after.rows["pool"]).all()
    assert (before.statistics["spatial"].scatter == after.statistics["spatial"].scatter).all()
    for other in (Counting("b"), Counting()):  # other weights, then other images
        describe(other, identity="x" if other.identity != first.identity else "y", cache=cache)
        assert sum(other.calls) == 23
    third = Counting()
    describe(third, identity=None, cache=cache)  # what has no identity is never kept
    assert third.calls


@pytest.mark.parametrize("damage", ["text", "empty", "fewer", "zip", "zeros"])
def test_an_output_that_is_lacking_or_damaged_is_made_again(tmp_path, damage):
    cache = FeatureCache(tmp_path, 10**9)
    describe(Counting(), identity="x", cache=cache)
    (file,) = tmp_path.glob("*/pool.npy")
    (tmp_path / "other").mkdir()  # not ours: never touched
    with file.open("wb") as damaged:
        if damage == "text":
            damaged.write(b"damaged")
        elif damage == "fewer":  # rows of another set
            np.save(damaged, np.zeros((5, 16)))
        elif damage == "zip":
            np.savez(damaged, np.zeros((23, 16)))
        elif damage == "zeros":  # an interrupted copy
            np.save(damaged, np.zeros((23, 16)))
    again = Counting()
    found = describe(again, identity="x", cache=cache)
    assert again.calls and found.rows["pool"].shape == (23, 16)
    assert not list(tmp_path.glob("*/*.partial")) and (tmp_path / "other").is_dir()


def test_the_cache_removes_what_was_unused_for_longest(tmp_path):
    rows = {"pool": np.zeros((100, 10))}  # 8 KB
    cache = FeatureCache(tmp_path, 20_000)
    for number, name in enumerate("ab"):
        cache.keep(name, {}, rows)
        os.utime(cache._place(name, {}), (number, number))
    assert cache.find("a", {}, ["pool"], 100)  # used: now b is the oldest
    cache.keep("c", {}, rows)
    assert [bool(cache.find(name, {}, ["pool"], 100)) for name in "abc"] == [True, False, True]
    FeatureCache(tmp_path, 1).keep("d", {}, rows)  # larger than allowed: kept alone
    assert len(list(tmp_path.iterdir())) == 1


def test_pruning_leaves_what_is_not_of_the_cache(tmp_path):
    name = "0123456789abcdef" * 2
    about = {"images": "x", "extractor": {}}
    foreign = {
        "thesis": {},
        "0123": about,  # no name of ours
        name: {},  # a name of ours, but not its content
    }
    for place, content in foreign.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "about.json").write_text(json.dumps(content))
    (tmp_path / ("e" * 32)).symlink_to(tmp_path / "0123")
    cache = FeatureCache(tmp_path, 0)
    cache.keep("a", {}, {"pool": np.zeros((3, 2))})
    mine = cache._place("a", {}) / "notes.npy"
    mine.write_text("notes")
    cache.keep("b", {}, {"pool": np.zeros((3, 2))})
    assert all((tmp_path / place / "about.json").is_file() for place in foreign)
    assert [file.name for file in mine.parent.iterdir()] == ["notes.npy"]
    assert cache.find("b", {}, ["pool"], 3)


def test_two_evaluations_write_one_cache_entry(tmp_path):
    cache, rows = FeatureCache(tmp_path, 10**9), np.ones((3, 2))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cache.keep("a", {}, {"pool": rows}), range(8)))
    assert (cache.find("a", {}, ["pool"], 3)["pool"] == rows).all()


def test_a_cache_that_cannot_be_written_costs_a_line_and_nothing_else(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = describe(Counting(), identity="x", cache=FeatureCache(tmp_path / "file", 10**9))
    assert len(found.rows["pool"]) == 23
    assert "warning: features of samples are not kept" in capsys.readouterr().err


def test_a_full_disk_leaves_no_part_of_a_file_in_the_cache(tmp_path, monkeypatch):
    def full(file, rows, **options):
        file.write(b"begun")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="no space"):
        FeatureCache(tmp_path, 10**9).keep("x", {}, {"pool": np.zeros((3, 2))})
    assert not list(tmp_path.glob("*/*"))


def test_a_folder_is_another_set_once_a_file_changes(tmp_path):
    for number in range(3):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    before = identity_of(FolderSet(tmp_path), None)
    assert identity_of(FolderSet(tmp_path), None) == before
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "1.png")
    os.utime(tmp_path / "1.png", (5, 5))
    assert identity_of(FolderSet(tmp_path), None) != before
    copied = identity_of(FolderSet(tmp_path), None)
    facts, content = (tmp_path / "1.png").stat(), (tmp_path / "2.png").read_bytes()
    (tmp_path / "1.png").write_bytes(content)  # same name, size and time, as by cp -p
    os.utime(tmp_path / "1.png", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert identity_of(FolderSet(tmp_path), None) != copied
    assert identity_of(SET, "hash") == "hash" and identity_of(SET, None) is None


def test_names_that_are_not_utf8_identify_a_set(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    before = identity_of(FolderSet(tmp_path), None)
    os.rename(tmp_path / "a.png", os.fsencode(tmp_path) + b"/a\xff.png")
    assert identity_of(FolderSet(tmp_path), None) != before


def test_reading_ahead_keeps_the_order_and_passes_errors_on():
    assert list(read_ahead(iter(range(1, 9)))) == list(range(1, 9))

    def broken():
        yield 1
        raise UserError("image 7 is damaged")

    with pytest.raises(UserError, match="image 7"):
        list(read_ahead(broken()))


def test_of_more_images_than_fit_only_statistics_are_kept(monkeypatch, tmp_path):
    for module in ("features", "compare"):
        monkeypatch.setattr(f"sit_vit5.evaluation.{module}.MOST_ROWS", 20)
    found = describe(Counting(), batch_size=23)
    assert not found.rows and found.statistics["pool"].count == 23
    expected = Statistics.of(Counting()(IMAGES)["pool"])
    np.testing.assert_allclose(found.statistics["pool"].covariance, expected.covariance)
    np.save(tmp_path / "many.npy", IMAGES)
    source = find_source(str(tmp_path / "many.npy"), {"features": "pixels"}, SET)
    metrics, notes = choose_metrics((), ("pool",), source)
    assert list(metrics) == ["fid"]
    assert "takes at most 20 reference images" in " ".join(notes)
    with pytest.raises(UserError, match="metric kid takes at most 20 reference images"):
        choose_metrics(("kid",), ("pool",), source)
    described = describe_source(source, metrics, Pass(Observing(Counting()), 4))
    assert described.statistics["pool"].count == 23 and not described.rows


def test_what_is_seen_of_images_is_kept_with_their_features(tmp_path):
    cache = FeatureCache(Path(tmp_path), 10**9)
    before = describe(Counting(), identity="x", cache=cache).rows[SEEN]
    after = describe(Counting(), identity="x", cache=cache).rows[SEEN]
    assert before.shape == (23, 9) and (before == after).all()
