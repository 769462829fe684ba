"""Options from YAML and the command line: layers, types, nearest names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt

import sit_vit5.config
from sit_vit5.commands.models import ListConfig
from sit_vit5.config import (
    ADAPTIVE_METHODS,
    SDE_METHODS,
    GridConfig,
    GuidanceConfig,
    MetricsConfig,
    ObjectiveConfig,
    PreviewConfig,
    SdeConfig,
    TrainConfig,
    presets,
    recipes,
)
from sit_vit5.config.flags import options_of
from sit_vit5.config.parse import (
    dump_config,
    load_config,
    load_saved_config,
    parse,
    parse_train,
)
from sit_vit5.config.recipes import Recipe
from sit_vit5.flow.interpolants import INTERPOLANTS
from sit_vit5.flow.loss import WEIGHTS
from sit_vit5.flow.predictions import PREDICTIONS
from sit_vit5.flow.times import TIMES
from sit_vit5.models.layers import MLPS, TOKEN_NORMS
from sit_vit5.sampling.field import SCHEDULES
from sit_vit5.sampling.ode import SOLVERS
from sit_vit5.sampling.sde import DIFFUSIONS, LAST_STEPS, SDE_SOLVERS
from sit_vit5.utils.errors import UserError


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def train_config(*argv: str) -> TrainConfig:
    return parse_train(list(argv))[0]


def test_command_line_overrides_yaml_and_yaml_overrides_defaults(tmp_path):
    path = yaml_file(tmp_path, "steps: 7\noptimizer:\n  lr: 3e-4\n  warmup_steps: 5\n")
    config = train_config("--config", path, "--optimizer.lr", "2e-3")
    assert (config.steps, config.optimizer.lr, config.optimizer.warmup_steps) == (7, 2e-3, 5)
    assert config.batch_size == TrainConfig().batch_size


def test_model_resets_the_backbone_and_backbone_options_apply_after_it(tmp_path):
    path = yaml_file(tmp_path, "model: SiT-B/4\nbackbone:\n  depth: 3\n")
    assert train_config("--config", path).backbone.depth == 3
    overridden = train_config("--config", path, "--model", "ViT5-S").backbone
    assert overridden == presets.backbone("ViT5-S/2")
    order = train_config("--backbone.depth", "2", "--model", "ViT5-S/8").backbone
    assert (order.depth, order.width, order.patch_size) == (2, 384, 8)


def test_dumped_configuration_reads_back_equal(tmp_path):
    config = train_config(
        "--model", "SiT-Nano/1", "--ema.decays", "0.9", "0.99", "--compile", "True",
        "--optimizer.betas", "0.8", "0.95", "--optimizer.eps", "1e-12", "--name", "x",
    )  # fmt: skip
    assert load_config(yaml_file(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer:\n  lrr: 1\n", "unknown option optimizer.lrr; nearest: optimizer.lr"),
        ("step: 5\n", "nearest: steps"),
        ("steps: many\n", "steps"),
        ("steps: 1.5\n", "steps"),
        ("optimizer:\n  betas: [0.9]\n", "optimizer.betas"),
        ("compile: maybe\n", "compile"),
        ("steps: 5\nsteps: 6\n", "key steps is given twice"),
        ("data:\n  on_bad_image: ignore\n", "on_bad_image ignore must be one of error, skip"),
        ("- a\n- b\n", "expected options"),
        ("a: [1\n", "not a YAML file"),
        ("model: ViT5-M\n", "unknown model 'ViT5-M'; nearest: ViT5-"),
        ("model: ViT5-S/14\n", "a patch is a power of two up to 1024, such as ViT5-S/2, or any"),
        ("steps: 0\n", "steps 0 must be at least 1"),
        ("ema:\n  decays: [{a: 1}]\n", "ema.decays must be a value or a list of values"),
        ("help: 1\n", "unknown option help"),
        ("a: " + "[" * 3000, "not a YAML file"),
        ("optimizer.lr: 1\noptimizer:\n  lr: 2\n", "key optimizer.lr is given twice"),
        ("steps: [1, 2]\n", "steps takes one value, not the list [1, 2]"),
        ("steps: [1]\n", "steps takes one value, not the list [1]"),
        ("steps: []\n", "steps takes one value, not the list []"),
        ("optimizer:\n  betas: [0.9, 0.99, 1]\n", "optimizer.betas takes 2 values, 3 given"),
        ("steps:\n", "steps has no value"),
        ("data:\n  path: ''\n", "data.path needs a value"),
        ("ema:\n  decays: [0.9, '']\n", "ema.decays needs a value"),
        ("ema:\n  decays: [0.9, ]\n  widths: [,]\n", "not a YAML file"),
        ("name: ''\n", "name needs a value"),
        ("init_from: ''\n", "init_from needs a value"),
        ('output_dir: "a\\0b"\n', "output_dir a\0b holds a NUL character"),
        ('output_dir: "a\\uD800b"\n', "holds characters that no file name has"),
        ("output_dir: ~nobody-of-this-name/runs\n", "no such home folder"),
        ("steps: 4.5\n", "steps 4.5 is not a whole number"),
        ("a: &a {b: 1}\nc: {d: *a, e: *a}\n", "alias *a is not supported"),
        ("a: &a [*a]\n", "alias *a is not supported"),
        ("? [a]\n: 1\n", "not a YAML file"),
        ("a: 1\n" * 2**18, "bytes; a configuration is far smaller"),
    ],
)
def test_faulty_yaml_is_refused_in_one_line_with_the_file_name(tmp_path, text, message):
    path = yaml_file(tmp_path, text)
    with pytest.raises(UserError) as error:
        train_config("--config", path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optimizer.lrr", "1"], "unknown option optimizer.lrr; nearest: optimizer.lr"),
        (["--batch-sise", "1"], "nearest: batch_size"),
        (["--steps", "many"], "many"),
        (["--steps", "3", "--steps", "4"], "given twice"),
        (["loose"], "loose"),
        (["--steps"], "steps"),
        (["--config"], "config needs a value"),
        (["--config", "absent.yaml"], "absent.yaml does not exist"),
        (["--config", "a.yaml", "--resume", "runs/a"], "exclude each other"),
        (["--resume", "runs/none"], "runs/none does not exist"),
        (["--ema.decays", "1.5"], "ema.decays"),
        (["--ema.decays"], "ema.decays"),
        (["--objective.class-dropout", "1"], "class_dropout"),
        (["--name", "a/b"], "plain folder name"),
        (["--name=-x"], "plain folder name"),
        (["--optimizer.clip-norm", "inf"], "optimizer.clip_norm inf must be finite"),
        (["--optimizer.lr", "nan"], "optimizer.lr nan must be finite"),
        (["--optimizer.lr", "-1"], "optimizer.lr -1.0 must be at least 0"),
        (["--optimizer.betas", "1", "0.9"], "optimizer.betas"),
        (["--optimizer.eps", "-1"], "optimizer.eps"),
        (["--optimizer.eps", "0"], "optimizer.eps 0.0 must be above 0"),
        (["--init-from", ""], "init_from needs a value"),
        (["--data.path="], "data.path needs a value"),
        (["--seed", "-1"], "seed"),
        (["--data.image-size", "0"], "data.image_size 0 must be at least 1"),
        (["--preview.columns", "0"], "preview.columns"),
        (["--preview.classes", "0"], "preview.classes"),
        (["--preview.steps", "0"], "preview.steps"),
        (["--backbone.mlp-ratio", "-1"], "mlp_ratio"),
        (["--backbone.recipe.registers", "-4"], "registers -4 must be at least 0"),
        (["--backbone.recipe.rope-theta", "-1"], "rope_theta -1.0 must be at least 1"),
        (["--backbone.recipe.rope-theta", "inf"], "rope_theta"),
        (["--backbone.recipe.layer-scale-init", "nan"], "layer_scale_init nan must be finite"),
        (["--model", "SiT-Nano", "--backbone.width", "66", "--backbone.heads", "2"], "by 4"),
        (["--resume", ""], "resume needs a value"),
        (["--config="], "config needs a value"),
        (["--config", "a.yaml", "--config", "b.yaml"], "option config is given twice"),
        (["--zzz"], "nearest: none, see --help"),
        (["--checkpoint.keep", "-1"], "checkpoint.keep -1 must be at least 0"),
        (["--recompute", "True"], "option recompute is now called activation_checkpointing"),
        (["--backbone.heads", "5"], "not divisible"),
        (["--preview.columns", "1000", "--preview.classes", "11"], "at most 10,000 images"),
        (["--backbone.recipe.registers", "3"], "square"),
        (["--backbone.recipe.registers", "0"], "--backbone.recipe.register-theta None"),
        (["--steps", "4.5"], "steps 4.5 is not a whole number"),
        (["--steps", "abc"], "steps abc is not a whole number"),
        (["--steps", "inf"], "steps inf is not a whole number"),
        (["--steps", "1e12"], "steps 1000000000000 must be at most 1,000,000,000"),
        (["--steps", "9" * 400], "is too large"),
        (["--steps", "3", "4"], "unexpected argument '4' after steps 3"),
        (["--optimizer.lr", "fast"], "optimizer.lr fast is not a number"),
        (["--optimizer.betas", "0.9"], "optimizer.betas takes 2 values, 1 given: 0.9"),
        (["--optimizer.betas", "0.9", "x"], "optimizer.betas x is not a number"),
        (["--ema.decays", "0.9", "x"], "ema.decays x is not a number"),
        (["--compile", "maybe"], "compile maybe must be True or False"),
        (["--preview.guidance-scale", "x"], "preview.guidance_scale x is not a number"),
        (["--precision", "fp16"], "precision fp16 must be one of bf16, tf32, fp32"),
        (["-x", "1"], "unknown option -x; options start with two dashes"),
        (["--data.workers", "1000000"], "data.workers 1000000 must be at most 256"),
        (["--backbone.depth", "100000"], "backbone.depth 100000 must be at most 1,024"),
        (["--watchdog.patience", "1e300"], "watchdog.patience 1e+300 must be at most 525,600"),
        (["--preview.columns", "1000000000"], "preview.columns 1000000000 must be at most"),
        (["--model", "ViT5-Nano", "--backbone.heads", "32"], "divisible by 4"),
    ],
)
def test_faulty_command_line_is_refused_in_one_line(argv, message):
    with pytest.raises(UserError) as error:
        train_config(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_values_that_look_like_flags_and_empty_sections_read_back(tmp_path):
    config = train_config("--data.path=-odd", "--output-dir=--odd", "--init-from=-1")
    assert load_config(yaml_file(tmp_path, dump_config(config))) == config
    assert load_config(yaml_file(tmp_path, "data:\nsteps: 3\n")).steps == 3


def test_words_are_translated_only_where_the_option_takes_them(tmp_path):
    assert train_config("--name", "true").name == "true"
    assert train_config("--name", "null").name is None
    assert train_config("--compile=true").compile is True
    grid = parse(GridConfig, ["--checkpoint", "x", "--classes", "true", "none", "3"])
    assert grid.classes == ("true", "none", "3")


@pytest.mark.parametrize("text", ["4e5", "400000.0", "4_00000", "+400000", "400000"])
def test_whole_numbers_are_read_in_every_spelling(tmp_path, text):
    assert train_config("--steps", text).steps == 400000
    assert load_config(yaml_file(tmp_path, f"steps: {text}\n")).steps == 400000


def test_home_folder_is_expanded_wherever_a_path_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = yaml_file(tmp_path, "output_dir: ~/runs\ndata:\n  path: ~/data\n")
    for config in (train_config("--config", path), train_config("--config=~/config.yaml")):
        assert config.output_dir == f"{tmp_path}/runs" and config.data.path == f"{tmp_path}/data"
        assert f"{tmp_path}/runs" in dump_config(config)
    grid = parse(GridConfig, ["--checkpoint", "~/a", "--out=~/g.png"])
    assert (grid.checkpoint, grid.out) == (f"{tmp_path}/a", f"{tmp_path}/g.png")
    options = parse(MetricsConfig, ["~/s.npz", "--reference", "~", "--report.out", "~/r.html"])
    assert options.samples == f"{tmp_path}/s.npz" and options.reference == str(tmp_path)
    assert options.report.out == f"{tmp_path}/r.html"


def dataclasses_of(package: ModuleType) -> list[type]:
    """The dataclasses that the modules of a package define."""
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
    ]


CONFIGS = [
    config
    for config in [*dataclasses_of(sit_vit5.config), ListConfig]
    if config.__name__.endswith(("Config", "Command"))
]
# Texts that are not files, by the last part of their names.
NO_FILES = {
    "agreement", "classes", "device", "features", "image_column", "intervals", "label",
    "label_column", "license", "metrics", "model", "name", "names", "reference_weights", "source",
    "split", "to_class", "trackers", "weights",
}  # fmt: skip


def numbers(hint: object, bounds: tuple = ()) -> Iterator[tuple]:
    """The bounds of every number in a type."""
    if hint in (int, float):
        yield bounds
    elif get_origin(hint) is Annotated:
        yield from numbers(get_args(hint)[0], get_args(hint)[1:])
    else:
        for inner in get_args(hint):
            yield from numbers(inner)


def fields_of(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every option of a command by its dotted name, with its annotation."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(plain):
            yield from fields_of(plain, "" if plain is TrainConfig else f"{prefix}{name}.")
        else:
            yield prefix + name, hint


@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_has_a_smallest_and_a_largest_value(config):
    for name, hint in fields_of(config):
        for bounds in numbers(hint):
            kinds = {type(bound) for bound in bounds}
            assert kinds & {Ge, Gt} and kinds & {Le, Lt}, name


@pytest.mark.parametrize("config", CONFIGS)
def test_every_file_option_expands_the_home_folder(config):
    for name, option in options_of(config, whole=TrainConfig).items():
        if "str" in str(option.hint) and not option.is_path:
            assert name.rpartition(".")[2] in NO_FILES, name


def test_a_saved_configuration_keeps_what_older_versions_trained(tmp_path):
    weighted = "objective:\n  prediction: data\n  weights: velocity\n"
    path = yaml_file(tmp_path, weighted)
    assert load_config(path).objective.weights_bound == 20
    assert load_saved_config(path).objective.weights_bound is None
    bounded = yaml_file(tmp_path, weighted + "  weights_bound: 7\n")
    assert load_saved_config(bounded).objective.weights_bound == 7
    summed = yaml_file(tmp_path, "backbone:\n  recipe:\n    layer_scale: sum\n")
    assert load_saved_config(summed).backbone.recipe.layer_scale == "none"
    assert load_saved_config(summed).objective.weights_bound == 20
    with pytest.raises(UserError, match=r"layer.scale.*sum.*none, product.*instead"):
        load_config(summed)


def test_every_configuration_names_how_layer_scale_meets_the_gate():
    for path in Path(__file__).parents[1].glob("configs/*.yaml"):
        assert "layer_scale:" in path.read_text()


def test_yaml_words_for_none_and_booleans_are_understood(tmp_path):
    path = yaml_file(
        tmp_path, "name: null\ncompile: true\nbackbone:\n  recipe:\n    rope_theta: ~\n"
    )
    config = train_config("--config", path)
    assert config.name is None and config.compile is True
    assert config.backbone.recipe.rope_theta is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--method", "dopri5", "--steps", "5"], "steps 5 has no effect: dopri5 chooses its steps"),
        (["--method", "dopri5", "--shift", "2"], "shift 2 has no effect"),
        (["--rtol", "0.1"], "rtol 0.1 has no effect: heun has a fixed grid; use steps"),
        (["--method", "dopri5", "--rtol", "0"], "rtol 0.0 must be above 0"),
        (["--method", "dopri5", "--atol", "-1"], "atol -1.0 must be above 0"),
        (["--steps", "0"], "steps 0 must be at least 1"),
        (["--sde.norm", "2"], "sde options have no effect on heun; use euler_maruyama or"),
        (["--method", "euler_maruyama", "--sde.last-step-size", "1"], "1.0 must be below 1"),
        (["--method", "euler_maruyama", "--sde.last-step", "none", "--sde.last-step-size", "0.1"],
         "no effect with sde.last_step none"),
        (["--method", "euler_maruyama", "--sde.last-step-size", "1e-9"], "must be at least 1e-06"),
        (["--method", "heum"], "heun"),
        (["--guidance.interval", "0.8", "0.2"], "guidance.interval 0.8 0.2 is upside down"),
        (["--guidance.interval", "0", "2"], "must lie within 0 and 1"),
        (["--guidance.channels", "0"], "guidance.channels 0 must be at least 1"),
        (["--guidance.scale", "-1"], "guidance.scale -1.0 must be at least 0"),
        (["--eps", "0.7"], "eps 0.7 must be below 0.5"),
        (["--guidance-scale", "2"], "nearest: guidance.scale"),
    ],
)  # fmt: skip
def test_options_of_another_sampler_are_refused_in_one_line(argv, message):
    with pytest.raises(UserError) as error:
        parse(GridConfig, ["--checkpoint", "x", *argv])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_objectives_that_no_run_can_have_are_refused():
    for argv, message in (
        (["--objective.weights", "velocity"], "has no effect on the prediction velocity"),
        (["--objective.times-mean", "1"], "need objective.times logit_normal"),
        (["--objective.shift", "0"], "objective.shift 0.0 must be at least"),
        (["--preview.method", "dopri5"], "dopri5"),
    ):
        with pytest.raises(UserError, match=message):
            train_config(*argv)


def test_sampling_commands_need_a_checkpoint_and_refuse_unknown_options():
    with pytest.raises(UserError, match="checkpoint"):
        parse(GridConfig, [])
    with pytest.raises(UserError, match="nearest: steps"):
        parse(GridConfig, ["--checkpoint", "x", "--num-step", "5"])
    options = parse(MetricsConfig, ["samples.npz", "--reference", "ref.npz"])
    assert (options.samples, options.features) == ("samples.npz", "inception")


def test_choices_on_the_command_line_are_the_implemented_ones():
    def choices(cls: type, field: str) -> set:
        return set(get_args(get_type_hints(cls)[field]))

    assert choices(Recipe, "norm") == set(TOKEN_NORMS)
    assert choices(Recipe, "mlp") == set(MLPS)
    assert choices(ObjectiveConfig, "interpolant") == set(INTERPOLANTS)
    assert choices(ObjectiveConfig, "prediction") == set(PREDICTIONS)
    assert choices(ObjectiveConfig, "weights") == {"none", *WEIGHTS}
    assert choices(ObjectiveConfig, "times") == set(TIMES)
    assert choices(GuidanceConfig, "schedule") == set(SCHEDULES)
    assert choices(SdeConfig, "diffusion") == set(DIFFUSIONS)
    assert choices(SdeConfig, "last_step") == {"none", *LAST_STEPS}
    assert set(SDE_METHODS) == set(SDE_SOLVERS)
    assert choices(GridConfig, "method") == {*SOLVERS, *ADAPTIVE_METHODS, *SDE_SOLVERS}
    assert choices(PreviewConfig, "method") == set(SOLVERS)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("configs/*.yaml")))
def test_every_shipped_configuration_loads(path):
    assert load_config(path).steps > 0


def test_every_ablation_differs_from_vit5_in_what_its_name_says():
    changes = {
        name: {
            field.name
            for field in fields(Recipe)
            if getattr(recipe, field.name) != getattr(recipes.VIT5, field.name)
        }
        for name, recipe in recipes.ABLATIONS.items()
    }
    assert changes == {
        "no_layer_scale": {"layer_scale"},
        "no_rms_norm": {"norm"},
        "no_ape": {"position"},
        "no_rope": {"rope_theta"},
        "no_registers": {"registers", "register_theta"},
        "no_register_rope": {"register_theta"},
        "no_qk_norm": {"qk_norm"},
        "qkv_bias": {"qkv_bias"},
        "swiglu": {"mlp"},
        "swiglu_no_layer_scale": {"mlp", "layer_scale"},
    }
    assert presets.backbone("ViT5-no_rope-B/4").recipe == recipes.ABLATIONS["no_rope"]


def test_model_names_cover_recipes_sizes_and_patches():
    names = presets.model_names()
    assert {"ViT5-XL/2", "SiT-B/4", "ViT5-S/8", "SiT-L/1"} <= set(names)
    assert presets.backbone("ViT5-XL") == presets.backbone("ViT5-XL/2")
    assert presets.backbone("ViT5-B/32").patch_size == 32  # any power of two, listed or not
    assert presets.model_name(presets.backbone("SiT-S/64")) == "SiT-S/64"
    xl = presets.backbone("SiT-XL/2")
    assert (xl.width, xl.depth, xl.heads) == (1152, 28, 16)


def test_saved_configurations_are_read_by_former_names(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("recompute: true\n")
    assert load_saved_config(path).activation_checkpointing
    with pytest.raises(UserError, match="recompute is now called activation_checkpointing"):
        load_config(path)
