"""Calibration before training: reproduce published values with the evaluator and the sampler.

The evaluator is checked on ADM's published samples, whose values its README states; the sampler on
SiT's released weights, whose FID is published but whose sampler settings are not. Missing inputs
are skipped, results are saved, and the same command continues.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sit_vit5.codecs.autoencoder import AUTOENCODERS, find
from sit_vit5.config import (
    CalibrateConfig,
    ConvertConfig,
    GenerateConfig,
    GuidanceConfig,
    MetricsConfig,
    SdeConfig,
)
from sit_vit5.evaluation.compare import Reference, open_reference
from sit_vit5.evaluation.evaluate import evaluate
from sit_vit5.evaluation.inputs import hash_of, open_image_set
from sit_vit5.interop.convert import convert_denoiser
from sit_vit5.metrics.features import find_inception_weights
from sit_vit5.models.checkpoint import open_checkpoint
from sit_vit5.models.official import read_official
from sit_vit5.report.published import PUBLISHED_SAMPLES, Expected, published
from sit_vit5.sampling.generate import complete_set
from sit_vit5.sampling.load import LoadedModel, load
from sit_vit5.utils.distributed import Processes, agree, gather
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import file_hash, lock, read_json, write_json
from sit_vit5.utils.progress import progress_bar
from sit_vit5.utils.run_folder import ARCHIVE

CHECKPOINT, RESULT = "sit-xl", "calibration.json"
WEIGHTS_OPTION = "--feature-weights"
EVALUATOR = "adm"
# Guidance of SiT's published value, on the channels that its code guides.
GUIDANCE = GuidanceConfig(scale=1.5, channels=3)
_BATCHES = "the list of batches in the folder evaluations of github.com/openai/guided-diffusion"


@dataclass(frozen=True)
class Sampler:
    """One reading of SiT's published sampler. norm: diffusion norm of the SDE; None for an ODE."""

    title: str
    method: str
    steps: int
    norm: float | None = None

    @property
    def flags(self) -> str:
        """The options by which sample/generate.py samples like this."""
        norm = "" if self.norm is None else f" --sde.norm {self.norm}"
        return f"--method {self.method} --steps {self.steps}{norm}"


# SiT's code integrates v + w s and draws sqrt(2 w) dW, its paper v + w s / 2 and sqrt(w) dW: the
# paper's w = sigma is half of the code's. Its author names the ODE (github.com/willisma/SiT, issue
# 18).
SAMPLERS = {
    "sde_norm_1": Sampler("SDE, norm 1.0 (the code's default)", "euler_maruyama", 250, norm=1.0),
    "sde_norm_0.5": Sampler(
        "SDE, norm 0.5 (the paper's w = sigma)", "euler_maruyama", 250, norm=0.5
    ),
    "ode_heun": Sampler("ODE, Heun with 125 steps", "heun", 125),
}


@dataclass(frozen=True)
class Missing:
    """Missing input: its option and file, and where to get it."""

    key: str
    text: str


@dataclass(frozen=True)
class Values:
    """Metrics of one sample set by their names in metrics.json, and their inputs' identity."""

    count: int
    samples_sha256: str | None
    reference_sha256: str | None
    extractor: dict
    frechet_distance: float
    spatial_frechet_distance: float | None = None
    inception_score: float | None = None
    precision: float | None = None
    recall: float | None = None


def calibrate(options: CalibrateConfig, processes: Processes) -> None:
    """Run all checks with inputs; print table and verdict, and write calibration.json."""
    options = replace(options, precision=options.precision or _default_precision(processes))
    with agree(processes):
        (missing,) = gather([missing_inputs(options) if processes.is_main else None], processes)[:1]
    say = print if processes.is_main else _silent
    for entry in missing:
        say(f"missing: {entry.text}")
    lacking, out = {entry.key for entry in missing}, Path(options.out)
    if {"adm_samples", "reference", "features"} & lacking and {"weights", "codec"} & lacking:
        raise UserError("nothing can be calibrated: the inputs named above are missing")
    with lock(out, "calibration") if processes.is_main else nullcontext():
        results = _run(out, options, lacking, processes, say)
        if not processes.is_main:
            return
        judged = judge(results, features=options.features)
        values = {name: asdict(found) for name, found in results.items()}
        write_json(out / RESULT, asdict(judged) | {"values": values})
    print(*table(results), *judged.verdict, out / RESULT, sep="\n")


def _silent(*_: object, **__: object) -> None:
    """Print nothing; for processes other than the main one."""


def _default_precision(processes: Processes) -> str:
    return "tf32" if processes.device.type == "cuda" else "fp32"


def missing_inputs(options: CalibrateConfig) -> list[Missing]:
    """Return missing inputs, each with its source."""
    files = {
        "reference": ("ADM's reference of ImageNet 256x256", _BATCHES),
        "adm_samples": ("ADM-G + ADM-U, its published samples of ImageNet 256x256", _BATCHES),
        "weights": ("SiT's released XL/2", "the table in the README of github.com/willisma/SiT"),
    }
    missing = []
    for key, (what, source) in files.items():
        path = getattr(options, key)
        if not Path(path).exists():
            option = f"--{key.replace('_', '-')}"
            missing.append(Missing(key, f"{what}, {path}: from {source}; {option} FILE"))
    codec = options.codec
    if codec.name in AUTOENCODERS:
        try:
            find(codec.name, codec.path, local_only=False)
        except UserError as error:
            text, hub = str(error), AUTOENCODERS[codec.name][0]
            if codec.path is None and hub is not None:
                text = (
                    f"the autoencoder {hub}: from Hugging Face, `hf download {hub}`; "
                    "--codec.path FOLDER"
                )
            missing.append(Missing("codec", text))
    if options.features == "inception":
        try:
            find_inception_weights(options.feature_weights, option=WEIGHTS_OPTION)
        except UserError as error:
            missing.append(Missing("features", str(error)))
    return missing


def _run(
    out: Path,
    options: CalibrateConfig,
    lacking: set[str],
    processes: Processes,
    say: Callable[..., None],
) -> dict[str, Values]:
    """Metrics for which all inputs are available. The cheap one, ADM's samples, comes first."""
    reference, results = None, {}

    def measure(name: str, samples: str) -> None:
        nonlocal reference
        if {"reference", "features"} & lacking:
            return
        asked = _metrics_options(options, samples)
        if reference is None:
            images = open_image_set(samples)
            reference = open_reference(asked, images, processes, weights_option=WEIGHTS_OPTION)
        values = _measure(out / f"{name}.metrics.json", asked, reference, processes, say)
        if values:
            results[name] = values
            title = SAMPLERS[name].title if name in SAMPLERS else "ADM's published samples"
            say(f"{title}: FID {values.frechet_distance:.4f}")

    if "adm_samples" not in lacking:
        measure(EVALUATOR, options.adm_samples)
    can_sample = not {"weights", "codec"} & lacking
    checkpoint = _converted(out / CHECKPOINT, options, processes) if can_sample else out
    loaded: LoadedModel | None = None
    for name, sampler in SAMPLERS.items():
        if can_sample:
            chosen = generate_options(sampler, options, checkpoint)
            loaded = loaded.under(chosen) if loaded else load(chosen, processes.device)
            with progress_bar(
                options.num_samples, unit="image", title=sampler.title, shown=processes.is_main
            ) as bar:
                complete_set(out / name, chosen, loaded, processes, bar=bar)
            processes.wait()  # the archive is written by the main process
        if (out / name / ARCHIVE).is_file():
            measure(name, str(out / name / ARCHIVE))
    return results


def generate_options(
    sampler: Sampler, options: CalibrateConfig, checkpoint: Path
) -> GenerateConfig:
    """The options by which sample/generate.py makes the samples."""
    return GenerateConfig(
        str(checkpoint),
        method=sampler.method,
        steps=sampler.steps,
        sde=SdeConfig() if sampler.norm is None else SdeConfig(norm=sampler.norm),
        guidance=GUIDANCE,
        num_samples=options.num_samples,
        batch_size=options.batch_size,
        precision=options.precision,
        seed=options.seed,
        codec_path=options.codec.path,
    )


def _converted(folder: Path, options: CalibrateConfig, processes: Processes) -> Path:
    """SiT's weights as a checkpoint, made by the main process unless they are there."""
    with agree(processes):
        if processes.is_main and not folder.exists():
            official = read_official(Path(options.weights))
            if not official.is_denoiser:
                raise UserError(f"--weights {options.weights} are not those of a SiT")
            asked = ConvertConfig(options.weights, str(folder), kind="sit", codec=options.codec)
            convert_denoiser(official, asked, folder)
        elif processes.is_main:
            made_of = open_checkpoint(folder).state.data.get("sha256")
            if made_of != file_hash(Path(options.weights)):
                raise UserError(
                    f"{folder} is made of other weights than {options.weights}; choose another "
                    "--out"
                )
    return folder


def _metrics_options(options: CalibrateConfig, samples: str) -> MetricsConfig:
    return MetricsConfig(
        samples,
        options.reference,
        features=options.features,
        weights=options.feature_weights,
        batch_size=options.batch_size,
        keep_features=False,
    )


def _measure(
    path: Path,
    asked: MetricsConfig,
    reference: Reference,
    processes: Processes,
    say: Callable[..., None],
) -> Values | None:
    """Metrics of a sample set, from the file if it is of the same images and reference.

    Only the main process returns them; the others help with the features and return None.
    """
    kept = None
    with agree(processes):
        if processes.is_main and path.is_file():
            kept = read_json(path, Values, remedy="remove it and run the same command again")
            same = (hash_of(asked.samples), reference.sha256, reference.extractor.identity)
            if (kept.samples_sha256, kept.reference_sha256, kept.extractor) != same:
                kept = None
    (known,) = gather([kept is not None], processes)[:1]
    if known:
        return kept
    result = evaluate(asked, reference=reference, processes=processes)
    for warning in result.get("warnings", ()):
        say(f"warning: {asked.samples}: {warning}")
    if not processes.is_main:
        return None
    write_json(path, result)
    return read_json(path, Values)


# Metrics of the table by their names in metrics.json: title, decimals.
COLUMNS = {
    "frechet_distance": ("FID", 4),
    "spatial_frechet_distance": ("sFID", 4),
    "inception_score": ("IS", 2),
    "precision": ("precision", 4),
    "recall": ("recall", 4),
}


def table(results: dict[str, Values]) -> list[str]:
    """Measured values above the published ones."""
    expected = published()
    stated = {name: entry.value for name, entry in expected.evaluator.items()}
    rows = [("", *(title for title, _ in COLUMNS.values()))]
    rows.append(_row("ADM's published samples", results.get(EVALUATOR)))
    rows.append(_cells("  as its README states", stated))
    for name, sampler in SAMPLERS.items():
        rows.append(_row(f"SiT-XL/2, {sampler.title}", results.get(name)))
    rows.append(_cells("  as published", {"frechet_distance": expected.sampler.value}))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def _row(title: str, values: Values | None) -> tuple[str, ...]:
    return _cells(title, asdict(values) if values else {})


def _cells(title: str, values: dict) -> tuple[str, ...]:
    cells = (
        "-" if values.get(name) is None else f"{values[name]:.{decimals}f}"
        for name, (_, decimals) in COLUMNS.items()
    )
    return (title, *cells)


@dataclass(frozen=True)
class Judged:
    """met: evaluator and a sampler meet the published values; verdict: lines for people."""

    met: bool
    verdict: list[str]


def judge(results: dict[str, Values], *, features: str) -> Judged:
    """Judge whether training may begin, and which sampler measures its FID."""
    if features != "inception":
        return Judged(False, [f"not judged: published values are not of the features {features}"])
    evaluator, first = _judge_evaluator(results.get(EVALUATOR))
    sampler, second = _judge_samplers({name: results[name] for name in SAMPLERS if name in results})
    return Judged(evaluator and sampler, [first, second])


def _judge_evaluator(values: Values | None) -> tuple[bool, str]:
    if values is None:
        return False, "evaluator: not checked"
    if values.count != PUBLISHED_SAMPLES:
        return (
            False,
            f"evaluator: not judged, {values.count:,} images instead of {PUBLISHED_SAMPLES:,}",
        )
    expected, off = published().evaluator, []
    for name, entry in expected.items():
        value = getattr(values, name)
        if value is None or not entry.met_by(value):
            off.append(f"{COLUMNS[name][0]} {_difference(value, entry)}")
    if off:
        return False, (
            f"evaluator: off by more than the tolerance: {', '.join(off)}; check the reference, "
            "the sample set and the Inception weights before anything else"
        )
    return True, "evaluator: meets the values of ADM's README"


def _difference(value: float | None, expected: Expected) -> str:
    if value is None:
        return "is missing"
    return f"{value - expected.value:+.4g} (at most {expected.tolerance:g})"


def _judge_samplers(results: dict[str, Values]) -> tuple[bool, str]:
    expected = published().sampler
    if not results:
        return False, "sampler: not checked"
    counts = {values.count for values in results.values()}
    if counts != {PUBLISHED_SAMPLES}:
        return (
            False,
            f"sampler: not judged, {min(counts):,} samples instead of {PUBLISHED_SAMPLES:,}",
        )
    by_distance = sorted(
        results, key=lambda name: abs(results[name].frechet_distance - expected.value)
    )
    nearest = SAMPLERS[by_distance[0]]
    fid = results[by_distance[0]].frechet_distance
    rest = ", ".join(SAMPLERS[name].title for name in SAMPLERS if name not in results)
    left = f"; not measured: {rest}" if rest else ""
    if not expected.met_by(fid):
        return False, (
            f"sampler: none gives the published {expected.value:g} within {expected.tolerance:g}, "
            f"the nearest is {nearest.title} with {fid:.3f}{left}; do not train before this is "
            "understood (docs/reproduce.md, When a number is off)"
        )
    return True, (
        f"sampler: {nearest.title} gives {fid:.3f}, published {expected.value:g} within "
        f"{expected.tolerance:g}: sample everything with {nearest.flags}{left}"
    )
