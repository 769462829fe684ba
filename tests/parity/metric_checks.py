"""Our metrics against the numbers of ADM's evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from comparison import Check, Tensors

from sit_vit5.metrics import frechet_distance_of, inception_score, precision_recall


def adm_metrics(facts: dict, tensors: Tensors, folder: Path) -> Iterator[Check]:
    for name, case in facts["cases"].items():
        scale = 300 if name == "large" else 1
        kind = "small" if name == "large" else name
        sample, reference = (
            (tensors[f"input.{kind}.{part}"] * scale).numpy() for part in ("sample", "ref")
        )
        distance = frechet_distance_of(sample, reference)
        error = abs(distance - case["fid_sample_vs_ref"])
        yield Check(f"{name} FID", error, case["tol_fid_abs"])
        exact = case["fid_float64_psd_eigenvalue_formula"]
        # Where a rank is lacking, roots of eigenvalues that are only rounding cost the fixture's
        # formula 1e-6 and, the more features there are, more.
        lacking = min(len(sample), len(reference)) <= sample.shape[1]
        tolerance = max(2e-6, 1e-8 * exact, case["tol_fid_abs"] if lacking else 0)
        yield Check(f"{name} FID against fp64", abs(distance - exact), tolerance)
        itself = frechet_distance_of(sample, sample)
        yield Check(f"{name} FID of itself", itself, 1e-9 * scale**2)
        found = precision_recall(samples=sample, reference=reference)
        for what, ours in (("precision", found.precision), ("recall", found.recall)):
            # The official distances are half precision.
            error = abs(ours - case[what])
            yield Check(f"{name} {what}", error, case["tol_precision_recall_abs"])
            error = abs(ours - case[f"{what}_float64"])
            tolerance = case["tol_precision_recall_float64_abs"]
            yield Check(f"{name} {what} against fp64", error, tolerance)
    yield from adm_inception_score(facts, tensors)
    sample, reference = (
        tensors[f"input.spatial.{part}"][..., :7].flatten(1) for part in ("sample", "ref")
    )
    expected = facts["sfid"]["sfid_first7_channels"]
    tolerance = facts["tolerance"]["sfid_rel"] * expected
    yield Check("sFID", abs(frechet_distance_of(sample, reference) - expected), tolerance)


def adm_inception_score(facts: dict, tensors: Tensors) -> Iterator[Check]:
    for name, case in facts["inception_score"].items():
        if not isinstance(case, dict):  # what the official code makes of a probability of 0: NaN
            continue
        probabilities = tensors[f"input.{name.rsplit('.split', 1)[0]}"]
        logits = probabilities.double().clamp_min(1e-300).log()
        found = inception_score(logits, split_size=case["split_size"])
        for against, expected in (
            ("", case["inception_score"]),
            (" against fp64", case["float64"]),
        ):
            tolerance = facts["tolerance"]["inception_score_rel"] * expected
            yield Check(f"{name}{against}", abs(found.value - expected), tolerance)
        errors = np.abs(np.subtract(found.splits, case["per_split_float64"]))
        yield Check(f"{name} splits", errors.max(), 1e-5)
