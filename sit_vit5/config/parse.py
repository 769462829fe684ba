"""Command lines and YAML files, read by one typed parser.

Both are turned into given options first, so that they get the same checks. Layers, later
wins: dataclass defaults, YAML file, command line. Within a layer `model` resets the backbone to
that preset, then `backbone.*` applies.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
import yaml

from sit_vit5.config import TrainConfig, presets
from sit_vit5.config.fields import FilePath
from sit_vit5.config.flags import (
    OUTPUTS,
    RENAMED,
    Given,
    describe,
    option_of,
    options_of,
    read_arguments,
    spell,
    take,
)
from sit_vit5.config.recipes import successor
from sit_vit5.config.yaml_options import flatten, read_yaml
from sit_vit5.utils.distributed import check_launcher_variables, launch_rank
from sit_vit5.utils.errors import PathError, UserError, brief, listed
from sit_vit5.utils.memory import out_of_memory
from sit_vit5.utils.run_folder import CONFIG_FILE, find_checkpoint, run_of
from sit_vit5.utils.streams import close_streams, guard_streams, printable

Config = TypeVar("Config")

# Seconds a rank other than 0 waits before it prints its error.
OTHER_RANKS_WAIT = 5

# Columns of a help text.
NARROWEST, WIDEST = 40, 500

# Booleans take a value, as in YAML.
TYRO = (tyro.conf.FlagConversionOff,)


@dataclass(frozen=True)
class TrainCommand:
    """Train a flow-matching model. An example without any data: --config configs/digits.yaml"""

    config: FilePath | None = None
    """YAML file with any of the options below."""
    resume: FilePath | None = None
    """Run folder to continue, or its checkpoint: same weights, same data order, same numbering."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs a command: a user's or the system's error becomes one line and exit status 2."""
    guard_streams()
    _clamp_width()
    try:
        check_launcher_variables()
        code = main(sys.argv[1:])
    except PathError as error:
        code = _print_error(f"{option_of(error.path, sys.argv[1:], among=OUTPUTS)}{error}")
    except UserError as error:
        code = _print_error(str(error))
    except OSError as error:  # no permission, no space, no such file
        code = _print_error(describe(error, sys.argv[1:]))
    except (MemoryError, RuntimeError) as error:
        if (message := out_of_memory(error)) is None:
            raise
        code = _print_error(message)
    except KeyboardInterrupt as interrupt:
        if launch_rank() == 0:
            message = ": ".join(["interrupted", *map(str, interrupt.args)])
            print(printable(message), file=sys.stderr)
        code = 130
    finally:
        close_streams()
    sys.exit(code or 0)


def _clamp_width() -> None:
    """Keeps COLUMNS within what text can be wrapped to: tyro never ends on a width of 3."""
    columns = shutil.get_terminal_size().columns
    if not NARROWEST <= columns <= WIDEST:
        os.environ["COLUMNS"] = str(min(max(columns, NARROWEST), WIDEST))


def _print_error(error: str) -> int:
    """One line for all ranks: the others wait, and the launcher ends them if rank 0 failed too."""
    if rank := launch_rank():
        time.sleep(OTHER_RANKS_WAIT)
    message = printable(f"{f'rank {rank}: ' if rank else ''}{error}")
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


def parse(config_type: type[Config], argv: list[str]) -> Config:
    """The options of a command that has no configuration file."""
    return _parse(config_type, _read(config_type, argv))


def parse_train(argv: list[str]) -> tuple[TrainConfig, Path | None]:
    """The configuration of a training run, and the checkpoint to resume from or None."""
    given = _read(TrainCommand, argv)
    config_file, given = take(given, "config")
    resume, given = take(given, "resume")
    if config_file and resume:
        raise UserError("--config and --resume exclude each other: a run keeps its configuration")
    config, checkpoint = TrainConfig(), None
    if resume:
        checkpoint = find_checkpoint(resume)
        # The run's own file holds what an interrupted resume had changed.
        own = run_of(checkpoint) / CONFIG_FILE
        config = load_saved_config(own if own.is_file() else checkpoint / CONFIG_FILE)
    elif config_file:
        config = load_config(config_file, config)
    return _parse(TrainConfig, given, default=_preset(config, given)), checkpoint


def parse_over_train(command: type[Config], argv: list[str]) -> Config:
    """The options of a command with a field `train` that is read as train_sit.py reads it."""
    given = _read(command, argv)
    config_file, _ = take(given, "config")
    config = load_config(config_file) if config_file else TrainConfig()
    return _parse(command, given, default=command(train=_preset(config, given)))


def load_config(path: str | Path, default: TrainConfig | None = None) -> TrainConfig:
    """The configuration in a YAML file, over `default`. Errors name the file and the key."""
    return _load(path, default or TrainConfig(), present=list)


def load_saved_config(path: str | Path) -> TrainConfig:
    """The configuration that `dump_config` wrote, perhaps an older version of it."""
    return _load(path, TrainConfig(), present=_present)


def _present(given: list[Given]) -> list[Given]:
    """The options of an older version as they are written now."""
    values = {item.name: item.values for item in given}
    options = []
    for item in given:
        item = replace(item, name=RENAMED.get(item.name, item.name))
        if item.name == "backbone.recipe.layer_scale":
            item = replace(item, values=[value and successor(value) for value in item.values])
        options.append(item)
    weighted = values.get("objective.weights", ["none"]) != ["none"]
    if weighted and "objective.weights_bound" not in values:  # it was trained without
        options.append(Given("objective.weights_bound", [None]))
    return options


def _load(
    path: str | Path, default: TrainConfig, present: Callable[[list[Given]], list[Given]]
) -> TrainConfig:
    if not os.path.exists(path):
        raise UserError(f"configuration file {path} does not exist")
    try:
        given = present(read_yaml(Path(path), options_of(TrainConfig)))
        return _parse(TrainConfig, given, default=_preset(default, given))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def dump_config(config: object) -> str:
    """YAML text that `load_config` reads back to an equal configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def to_dict(config: object) -> dict:
    """Nested plain values: dataclasses become dicts, tuples lists."""
    plain = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            value = to_dict(value)
        plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def differences(old: object, new: object) -> list[str]:
    """The fields in which two configurations differ, as `optimizer.lr: 0.0001 -> 0.001`."""
    before, after = flatten(to_dict(old)), flatten(to_dict(new))
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]


def _read(command: type, argv: list[str]) -> list[Given]:
    """The options on a command line; prints the help instead, and exits, if it is asked for."""
    if "-h" in argv or "--help" in argv:
        tyro.cli(command, args=["--help"], config=TYRO)
    return read_arguments(argv, options_of(command, whole=TrainConfig))


def _preset(config: TrainConfig, given: list[Given]) -> TrainConfig:
    """The configuration with the backbone that `model` names, if it is given."""
    model, _ = take(given, "model")
    return replace(config, model=model, backbone=presets.backbone(model)) if model else config


def _parse(cls: type[Config], given: list[Given], default: Config | None = None) -> Config:
    """The configuration with the given options, the others as in `default`."""
    options = options_of(cls, whole=TrainConfig)
    arguments = spell(given, options)
    missing = {name for name, option in options.items() if option.required}
    if default is None and (missing := missing - {item.name for item in given}):
        raise UserError(f"{listed(sorted(missing))} must be given; see --help")
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=arguments, default=default, config=TYRO)
    except SystemExit as stop:
        raise _own_error(stop) or UserError(brief(captured.getvalue())) from None


def _own_error(error: BaseException | None) -> UserError | None:
    """The error of a configuration's own checks, which tyro catches and frames."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
