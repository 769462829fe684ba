"""The sweep: its cells, what it keeps, what it refuses, and that only settings differ by cell."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, TINY, command_environment, command_line
from PIL import Image

from sit_vit5.config import GenerateConfig, GuidanceConfig, MetricsConfig, SdeConfig, SweepConfig
from sit_vit5.config.parse import parse
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.sweep import (
    Cell,
    Labels,
    Result,
    best_of,
    columns,
    command_flags,
    csv_text,
    sweep,
    sweep_cells,
    table,
)
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.sampling.generate import generate
from sit_vit5.sampling.generator import Generator
from sit_vit5.utils.distributed import Processes
from sit_vit5.utils.errors import UserError

ALONE = Processes(0, 1, torch.device("cpu"), lambda: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of the tiny configuration."""
    folder = tmp_path_factory.mktemp("runs")
    subprocess.run(
        command_line("train_sit.py", *TINY, "--output-dir", folder, "--steps", 40,
                     "--checkpoint.every", 0, "--ema.decays", 0.5, 0.9),
        cwd=ROOT, env=command_environment(), check=True, capture_output=True,
    )  # fmt: skip
    return folder / "tiny"


def options(run: Path, out: Path, **changes) -> SweepConfig:
    chosen = dict(
        reference="digits:held-out", features="pixels", scales=(1.0, 4.0), num_samples=12,
        intervals=("0,1", "0.5,1"), steps=2, batch_size=8, out=str(out),
    )  # fmt: skip
    return SweepConfig(str(run), **chosen | changes)


def cell_samples(out: Path) -> dict[str, np.ndarray]:
    return {
        folder.name: np.load(folder / "samples.npz")["arr_0"].astype(int)
        for folder in (out / "cells").iterdir()
    }


def test_cells_are_all_combinations_and_scale_one_runs_once(trained, tmp_path):
    checkpoint = open_checkpoint(trained)
    cells = sweep_cells(options(trained, tmp_path), checkpoint)
    assert [cell for cell in cells if cell.weights == "ema_0.9"] == [
        Cell("ema_0.9", 1.0, None),
        Cell("ema_0.9", 4.0, (0.0, 1.0)),
        Cell("ema_0.9", 4.0, (0.5, 1.0)),
    ]
    assert {cell.weights for cell in cells} == {"ema_0.5", "ema_0.9"}
    twice = options(
        trained, tmp_path, weights=("ema", "ema_0.9", "raw"), scales=(2, 2.0), intervals=("0,1.0",)
    )
    assert sweep_cells(twice, checkpoint) == [
        Cell("ema_0.9", 2.0, (0.0, 1.0)),
        Cell("raw", 2.0, (0.0, 1.0)),
    ]


GENERATED = [
    GenerateConfig("runs/a b"),
    GenerateConfig(
        "r", weights="raw", steps=7, seed=3, classes=("a", "b c"), labels="balanced",
        guidance=GuidanceConfig(
            scale=1.25, channels=3, interval=(0.25, 3), interval_unit="sigma", reference="other"
        ),
        method="euler_maruyama", sde=SdeConfig(norm=0.5),
    ),
    GenerateConfig("r", method="dopri5", atol=1e-7, rtol=1e-5),
]  # fmt: skip


@pytest.mark.parametrize("config", GENERATED, ids=range(len(GENERATED)))
def test_command_flags_are_read_back_as_the_same_options(config):
    assert parse(GenerateConfig, command_flags(config)) == config
    assert len(command_flags(GENERATED[0])) == 2  # nothing that is default


def test_a_sweep_writes_table_csv_json_and_picture_with_their_n(trained, tmp_path, capsys):
    sweep(options(trained, tmp_path, agreement="digits", scales=(1, 1.001, 100)), ALONE)
    shown = capsys.readouterr().out
    assert "N = 12 per cell: distances of so few samples are biased" in shown
    assert "Frechet distance of pixels-12" in shown and "classified as asked-12" in shown
    found = json.loads((tmp_path / "sweep.json").read_text())
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert len(rows) == len(found["rows"]) == 2 * (1 + 2 + 2)
    name = "frechet_distance_pixels_12"
    assert float(rows[3][name]) == found["rows"][3][name]
    assert found["best"] == min(found["rows"], key=lambda row: row[name])
    assert found["best_unguided"]["guidance_scale"] == 1
    width, height = Image.open(tmp_path / "sweep.png").size
    assert width > 2 * height  # two panels
    # Cells differ by their settings only: the same noise and labels, so a hair of guidance moves
    # nothing, and a lot moves something.
    images = cell_samples(tmp_path)
    plain, hair, much = (
        images["ema_0.9_scale_" + end] for end in ("1", "1.001_interval_0_1", "100_interval_0_1")
    )
    assert np.abs(plain - hair).max() <= 1 and np.abs(plain - much).max() > 20
    assert np.abs(much - images["ema_0.9_scale_100_interval_0.5_1"]).max() > 10
    assert np.abs(plain - images["ema_0.5_scale_1"]).max() > 1
    assert np.abs(plain - plain[::-1]).mean() > 10
    manifests = [json.loads(file.read_text()) for file in tmp_path.glob("cells/*/samples.json")]
    assert len({str(manifest["labels"]) for manifest in manifests}) == 1


def test_the_best_command_makes_the_best_cell_and_its_distance(trained, tmp_path):
    sweep(options(trained, tmp_path / "sweep"), ALONE)
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    flags = found["best_command"].split()
    assert flags[:2] == ["python", "sample/generate.py"]
    generate(parse(GenerateConfig, [*flags[2:], "--out", str(tmp_path / "again")]), ALONE)
    cell = tmp_path / "sweep" / "cells" / found["best"]["folder"]
    archive = tmp_path / "again" / "samples.npz"
    assert archive.read_bytes() == (cell / "samples.npz").read_bytes()
    scored = evaluate(MetricsConfig(str(archive), "digits:held-out", features="pixels"))
    expected = pytest.approx(scored["frechet_distance"], rel=1e-9)  # another batch size
    assert found["best"]["frechet_distance_pixels_12"] == expected


def test_a_stopped_sweep_goes_on_where_it_was(trained, tmp_path, monkeypatch):
    sweep(options(trained, tmp_path / "whole"), ALONE)
    calls, real = [], Generator.__call__

    def call(generator, indices, labels):
        calls.append(len(indices))
        if len(calls) == 4:  # each of the six cells takes two
            raise KeyboardInterrupt
        return real(generator, indices, labels)

    monkeypatch.setattr(Generator, "__call__", call)
    with pytest.raises(KeyboardInterrupt, match="8 of 12 images"):
        sweep(options(trained, tmp_path / "cut"), ALONE)
    first = json.loads((tmp_path / "cut" / "sweep.json").read_text())
    assert not first["complete"]
    sweep(options(trained, tmp_path / "cut"), ALONE)
    assert len(calls) == 4 + 12 - 3
    for kind in ("csv", "json", "png"):
        whole, cut = (tmp_path / name / f"sweep.{kind}" for name in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), kind
    # Further cells in the same folder: only they are made, and the agreement needs no images.
    sweep(options(trained, tmp_path / "cut", scales=(1, 4, 2), agreement="digits"), ALONE)
    assert len(calls) == 4 + 12 - 3 + 2 * 2 * 2
    rows = json.loads((tmp_path / "cut" / "sweep.json").read_text())["rows"]
    for number, file in enumerate(sorted((tmp_path / "cut" / "cells").glob("*/metrics.json"))[:2]):
        file.write_text(["{", '{"samples_sha256": 5}'][number])  # damaged: measured again
    sweep(options(trained, tmp_path / "cut", scales=(1, 4, 2), agreement="digits"), ALONE)
    assert json.loads((tmp_path / "cut" / "sweep.json").read_text())["rows"] == rows
    (tmp_path / "cut" / "sweep.json").write_text("[" * 10**5)
    with pytest.raises(UserError, match="sweep.json cannot be read: .*; it is not a sweep's"):
        sweep(options(trained, tmp_path / "cut"), ALONE)
    assert len(rows) == 10 and all(0 <= row["agreement_12"] <= 1 for row in rows)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 3}, "steps: 2 -> 3"),
        ({"seed": 1, "scales": (7.0,)}, "seed: 0 -> 1"),
        ({"num_samples": 13}, "num_samples: 12 -> 13"),
        ({"reference": "digits:train"}, "reference: digits:held-out -> digits:train"),
        ({"guidance": GuidanceConfig(schedule="linear")}, "schedule: constant -> linear"),
    ],
    ids=str,
)
def test_other_settings_are_refused_in_the_same_folder(trained, tmp_path, change, message):
    sweep(options(trained, tmp_path, scales=(1.0,), weights=("ema",)), ALONE)
    with pytest.raises(UserError, match="with other settings") as error:
        sweep(options(trained, tmp_path, **change), ALONE)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scales": (-1.0,)}, "scales -1.0 must be at least 0"),
        ({"scales": ()}, "need a value each"),
        ({"intervals": ("0.5",)}, "intervals 0.5 must be LOW,HIGH"),
        ({"intervals": ("a,b",)}, "intervals a,b must be LOW,HIGH"),
        ({"intervals": ("0.5,0.2",)}, "intervals 0.5 0.2 is upside down"),
        ({"intervals": ("nan,1",)}, "upside down"),
        ({"intervals": ("0.5,2",)}, "intervals 0.5 2 must lie within 0 and 1"),
        ({"guidance": GuidanceConfig(scale=2.0)}, "guidance.scale has no effect on a sweep"),
        ({"guidance": GuidanceConfig(interval=(0, 0.5))}, "guidance.interval has no effect"),
        ({"weights": ("ema_0.7",)}, "weights 'ema_0.7' are not in"),
        ({"reference": "absent"}, "'absent' does not exist"),
        ({"agreement": "cats"}, "not a labelled built-in set"),
        ({"guidance": GuidanceConfig(interval_unit="step"), "intervals": ("0,9",)}, "in 0..1"),
    ],
    ids=str,
)
def test_a_wrong_sweep_is_refused_before_any_image(trained, tmp_path, change, message):
    with pytest.raises(UserError) as error:
        sweep(options(trained, tmp_path, **change), ALONE)
    assert message in str(error.value)
    assert not (tmp_path / "cells").exists()


def test_reports_mark_the_best_and_leave_out_what_was_not_asked_for():
    labels = Labels(5, "inception", "ref.npz")
    cells = [Cell("raw", 1.0, None), Cell("raw", 1.5, (0.25, 1.0))]
    results = [Result(cell, 9.0 - cell.scale, None, 4, 6) for cell in cells]
    assert best_of(results) is results[1]
    lines = table(results, labels).splitlines()
    assert lines[0].split()[:4] == ["weights", "scale", "interval", "FID-5"]
    assert lines[2].split() == ["raw", "1.5", "0.25,1", "7.5000", "6", "best"]
    assert "best" not in lines[1]
    header, first, _ = csv_text([columns(result, labels) for result in results]).splitlines()
    assert header.startswith("weights,guidance_scale,interval_low,interval_high,num_samples,fre")
    assert "agreement" not in header and first.startswith("raw,1.0,,,5,8.0,4,6,raw_scale_1")
