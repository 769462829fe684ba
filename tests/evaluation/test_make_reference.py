"""evaluate/reference.py: what it makes, goes on with, refuses and says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import run_here
from PIL import Image

from sit_vit5.config import MakeReferenceConfig
from sit_vit5.data.array_sources import Digits
from sit_vit5.data.transforms import center_crop
from sit_vit5.evaluation import references as module
from sit_vit5.evaluation.references import inspect, make_reference
from sit_vit5.metrics.reference import read_reference, write_reference
from sit_vit5.metrics.statistics import Statistics
from sit_vit5.utils.distributed import alone
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash

ALONE = alone()
SCRIPT = "evaluate/reference.py"


def options(data: object, out: Path, **changes) -> MakeReferenceConfig:
    chosen = {"image_size": 8, "features": "pixels", "workers": 0, "batch_size": 10, **changes}
    return MakeReferenceConfig(data=str(data), out=str(out), **chosen)


def test_digits_give_their_own_statistics_and_a_choice_of_images(tmp_path):
    path = make_reference(options("digits", tmp_path / "ref.npz", num_images_kept=50), ALONE)
    found, digits = read_reference(path), Digits("held-out")
    features = digits.images.reshape(len(digits), -1) / 255
    np.testing.assert_allclose(found.pool.mean, features.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.pool.covariance, np.cov(features, rowvar=False), atol=1e-12)
    assert found.spatial is None and found.count == 360 and found.image_shape == (8, 8, 1)
    assert found.facts["data"] == digits.identity and found.facts["bad_images"] == 0
    kept = found.images.images(range(50))
    rows = [int(np.flatnonzero((digits.images == image).all((1, 2, 3)))[0]) for image in kept]
    assert rows == sorted(set(rows)) and rows != list(range(50))
    assert (found.labels == digits.labels[rows]).all()
    assert [file.name for file in tmp_path.iterdir()] == ["ref.npz"]


def test_images_take_the_crop_of_training_and_never_a_mirror(tmp_path, image_folder):
    path = make_reference(options(image_folder, tmp_path / "ref.npz"), ALONE)
    found = read_reference(path)
    files = sorted(image_folder.rglob("*.png"))
    cropped = np.stack([center_crop(Image.open(file), 8) for file in files])
    assert (found.images.images(range(24)) == cropped).all()  # all of them: fewer than asked
    assert found.facts["class_names"] == ["cat", "dog"]
    expected = Statistics.of(cropped.reshape(24, -1) / 255)
    np.testing.assert_allclose(found.pool.covariance, expected.covariance, atol=1e-12)


def test_a_killed_run_goes_on_and_the_bytes_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    whole = make_reference(options("digits", tmp_path / "whole.npz"), ALONE)
    chosen = options("digits", tmp_path / "ref.npz")
    write, written = module.write_npz, []

    def killed(path: Path, arrays: dict) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, arrays)

    monkeypatch.setattr(module, "write_npz", killed)
    with pytest.raises(KeyboardInterrupt):
        make_reference(chosen, ALONE)
    monkeypatch.setattr(
        module, "write_npz", lambda path, arrays: (written.append(path), write(path, arrays))
    )
    with pytest.raises(UserError, match="holds parts of a reference with other settings .*seed: 0"):
        make_reference(options("digits", tmp_path / "ref.npz", seed=1), ALONE)
    make_reference(chosen, ALONE)
    assert [path.name for path in written] == [f"{n:05d}.npz" for n in range(4)]
    assert file_hash(tmp_path / "ref.npz") == file_hash(whole)


def parts(tmp_path, monkeypatch) -> tuple[MakeReferenceConfig, Path]:
    """Options of a reference whose parts are all made, and their folder."""
    chosen = options("digits", tmp_path / "ref.npz", num_images_kept=50)
    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", lambda job: None)
        make_reference(chosen, ALONE)
    return chosen, tmp_path / "ref.npz.parts"


def stored(path: Path, **changes) -> dict:
    return {**np.load(path), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {"pool.count": np.array(3)},
        {"pool.count": np.array([360])},
        {"pool.mean": np.zeros(63)},
        {"pool.mean": np.full(64, "x")},
        {"pool.scatter": np.full((64, 64), np.nan)},
        {"facts": np.array("[]")},
        {"facts": np.array('{"sha256": 5, "kept_sha256": ""}')},
        {"facts": np.array('{"sha256": "", "kept_sha256": "", "bad": {"999": "x"}}')},
    ],
)
def test_damaged_parts_name_the_folder_to_remove(tmp_path, monkeypatch, changes):
    chosen, folder = parts(tmp_path, monkeypatch)
    path = folder / "00000.npz"
    np.savez(path, **({"a": 1} if changes is None else stored(path, **changes)))
    with pytest.raises(UserError, match=r"00000.npz .*remove .*ref.npz.parts and run the same"):
        make_reference(chosen, ALONE)


def test_kept_images_of_an_interrupted_copy_are_refused(tmp_path, monkeypatch):
    chosen, folder = parts(tmp_path, monkeypatch)
    content = (folder / "kept.npy").read_bytes()
    for damaged in (content[:-64], content[:-64] + bytes(64), b""):
        (folder / "kept.npy").write_bytes(damaged)
        with pytest.raises(UserError, match="kept.npy is damaged: .*; remove .*ref.npz.parts and"):
            make_reference(chosen, ALONE)
    (folder / "kept.npy").write_bytes(content)
    assert read_reference(make_reference(chosen, ALONE)).images.count == 50


def test_a_reference_is_complete_already_and_parts_are_removed(tmp_path, monkeypatch, capsys):
    chosen, folder = parts(tmp_path, monkeypatch)
    monkeypatch.setattr(module, "remove_own", lambda *arguments: None)
    make_reference(chosen, ALONE)  # killed before the parts are removed
    monkeypatch.undo()
    (folder / "mine.txt").write_text("mine")
    before = file_hash(tmp_path / "ref.npz")
    make_reference(chosen, ALONE)
    assert "complete already, made with the same settings" in capsys.readouterr().out
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]
    with pytest.raises(UserError, match=r"holds a reference made with other settings .*seed: 0 ->"):
        make_reference(options("digits", tmp_path / "ref.npz", seed=1), ALONE)
    assert file_hash(tmp_path / "ref.npz") == before
    damaged = bytearray((tmp_path / "ref.npz").read_bytes())
    damaged[1000] ^= 1  # in sigma
    (tmp_path / "ref.npz").write_bytes(damaged)
    with pytest.raises(UserError, match="ref.npz is damaged: .*; remove it and run the same"):
        make_reference(chosen, ALONE)


def test_a_bad_image_stops_or_is_left_out_and_counted(tmp_path, image_folder):
    (image_folder / "cat" / "00.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match="00.png: cannot be decoded .* or use --on-bad-image skip"):
        make_reference(options(image_folder, tmp_path / "a.npz"), ALONE)
    # The advice is taken in the same place.
    path = make_reference(options(image_folder, tmp_path / "a.npz", on_bad_image="skip"), ALONE)
    found = read_reference(path)
    assert (found.count, found.images.count, found.facts["bad_images"]) == (23, 23, 1)
    second = center_crop(Image.open(image_folder / "cat" / "01.png"), 8)
    assert (found.images.images([0])[0] == second).all()
    assert found.labels.tolist() == [0] * 11 + [1] * 12


def test_the_command_makes_with_two_processes_what_one_makes_and_inspects_it(
    tmp_path, command, capsys
):
    words = ("make", "digits", "--image-size", 8, "--features", "pixels", "--workers", 0)
    finished = command(SCRIPT, *words, "--out", tmp_path / "two.npz", processes=2)
    run_here(SCRIPT, *words, "--out", tmp_path / "one.npz")
    assert finished.stdout.splitlines()[-1] == str(tmp_path / "two.npz")
    assert file_hash(tmp_path / "one.npz") == file_hash(tmp_path / "two.npz")
    capsys.readouterr()
    run_here(SCRIPT, "inspect", tmp_path / "one.npz")
    text = capsys.readouterr().out
    for said in (
        "sit_vit5: made by",
        f"sha256 {file_hash(tmp_path / 'one.npz')}",
        "precision, recall, KID: some of the images",
        "extractor.features: pixels",
        "360 images, 8x8 pixels",
        "mu, sigma: 64 features, finite, symmetric",
    ):
        assert said in text, said


def test_inspect_finds_statistics_that_are_none_and_looks_at_plain_images(tmp_path, image_folder):
    path = tmp_path / "ref.npz"
    broken = Statistics(10, np.zeros(2), np.array([[9.0, 12.0], [12.0, 9.0]]))
    facts = {"count": 10, "image_shape": [2, 2, 3], "extractor": {}}
    write_reference(path, pool=broken, spatial=None, images=np.zeros((1, 2, 2, 3), np.uint8),
                    labels=None, facts=facts)  # fmt: skip
    text, sound = inspect(str(path))
    assert not sound and "NOT a covariance: smallest eigenvalue -0.333" in text
    text, sound = inspect(str(image_folder))
    assert sound and "24 images, 16x20 pixels, 3 channels in 2 folders: 24 PNG" in text


def test_wrong_words_and_places_are_refused(tmp_path):
    (tmp_path / "there.npz").touch()
    with pytest.raises(UserError, match="exists; choose another --out or remove it"):
        make_reference(options("digits", tmp_path / "there.npz"), ALONE)
    with pytest.raises(UserError, match="must end in .npz"):
        options("digits", tmp_path / "ref")
    with pytest.raises(UserError, match="inception_weights has no use with features pixels"):
        options("digits", tmp_path / "a.npz", inception_weights="w.pth")
    Image.new("RGB", (9, 9)).save(tmp_path / "loose.png")
    with pytest.raises(UserError, match=r"one sub-folder per class.*\(--unconditional True\)"):
        make_reference(options(tmp_path, tmp_path / "a.npz"), ALONE)
    with pytest.raises(UserError, match="does not exist"):
        make_reference(options(tmp_path / "absent", tmp_path / "a.npz"), ALONE)
    with pytest.raises(UserError, match="digits:train is built in; drop --source and --split"):
        make_reference(options("digits:train", tmp_path / "a.npz", split="train"), ALONE)
    for words in ([], ["mak"]):
        with pytest.raises(UserError, match="expected make or inspect first"):
            run_here(SCRIPT, *words)
