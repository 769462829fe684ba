"""Command lines and YAML files, read by one typed parser.

A YAML file is turned into flags first, so that both sources get the same checks. Layers, later
wins: dataclass defaults, YAML file, command line. Within a layer `model` resets the backbone to
that preset, then `backbone.*` applies.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

import tyro
import yaml

from sit_vit5 import presets
from sit_vit5.config import TrainConfig
from sit_vit5.distributed import launch_rank
from sit_vit5.errors import UserError, nearest
from sit_vit5.recipes import successor
from sit_vit5.run_folder import CONFIG_FILE, find_checkpoint, run_of
from sit_vit5.streams import close_streams, guard_streams, printable

Config = TypeVar("Config")

# Seconds a rank other than 0 waits before it prints its error.
OTHER_RANKS_WAIT = 5

# YAML's and the shell's spellings of Python's words.
_WORDS = {"true": "True", "false": "False", "null": "None", "~": "None"}


@dataclass(frozen=True)
class TrainCommand:
    """Train a flow-matching model. An example without any data: --config configs/digits.yaml"""

    config: str | None = None
    """YAML file with any of the options below."""
    resume: str | None = None
    """Run folder to continue, or its checkpoint: same weights, same data order, same numbering."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs a command: a user's or the system's error becomes one line and exit status 2."""
    guard_streams()
    try:
        code = main(sys.argv[1:])
    except (UserError, OSError) as error:  # OSError: no permission, no space, no such file
        _print_error(error, launch_rank())
        code = 2
    except KeyboardInterrupt as interrupt:
        if launch_rank() == 0:
            message = ": ".join(["interrupted", *map(str, interrupt.args)])
            print(printable(message), file=sys.stderr)
        code = 130
    finally:
        close_streams()
    sys.exit(code or 0)


def _print_error(error: Exception, rank: int) -> None:
    """One line for all ranks: the others wait, and the launcher ends them if rank 0 failed too."""
    if rank:
        time.sleep(OTHER_RANKS_WAIT)
    message = printable(f"{f'rank {rank}: ' if rank else ''}{error}")
    print(f"error: {message}", file=sys.stderr, flush=True)


def parse(config_type: type[Config], argv: list[str]) -> Config:
    """The options of a command that has no configuration file."""
    return _parse(config_type, argv, default=None, source="")


def parse_train(argv: list[str]) -> tuple[TrainConfig, Path | None]:
    """The configuration of a training run, and the checkpoint to resume from or None."""
    if "-h" in argv or "--help" in argv:
        _parse(TrainCommand, argv, default=None, source="")
    config_file, argv = _take_option(argv, "config")
    resume, argv = _take_option(argv, "resume")
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
    return _layer(config, argv, source=""), checkpoint


def parse_over_train(command: type[Config], argv: list[str]) -> Config:
    """The options of a command with a field `train` that is read as train_sit.py reads it."""
    if "-h" in argv or "--help" in argv:
        return _parse(command, argv, default=None, source="")
    config_file, _ = _take_option(argv, "config")
    config = load_config(config_file) if config_file else TrainConfig()
    return _parse(command, argv, default=command(train=_preset(config, argv)), source="")


def load_config(path: str | Path, default: TrainConfig | None = None) -> TrainConfig:
    """The configuration in a YAML file, over `default`. Errors name the file and the key."""
    flags = _yaml_flags(Path(path))
    return _layer(default or TrainConfig(), flags, source=f"{path}: ")


def load_saved_config(path: str | Path) -> TrainConfig:
    """The configuration that `dump_config` wrote, perhaps an older version of it."""
    flags = []
    for flag in _yaml_flags(Path(path)):
        name, _, value = flag.partition("=")
        renamed = name == "--backbone.recipe.layer_scale"
        flags.append(f"{name}={successor(value)}" if renamed else flag)
    return _layer(TrainConfig(), flags, source=f"{path}: ")


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


def _layer(config: TrainConfig, flags: list[str], *, source: str) -> TrainConfig:
    return _parse(TrainConfig, flags, default=_preset(config, flags), source=source)


def _preset(config: TrainConfig, flags: list[str]) -> TrainConfig:
    """The configuration with the backbone that `--model` names, if the flags have it."""
    model, _ = _take_option(flags, "model")
    if model is None:
        return config
    return replace(config, model=model, backbone=presets.backbone(model))


def _parse(cls: type[Config], argv: list[str], *, default: Config | None, source: str) -> Config:
    _check_flags(cls, argv, source)
    argv = _python_words(argv, _flag_hints(cls))
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=argv, default=default, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(source + _one_line(captured.getvalue())) from None


def _python_words(argv: list[str], hints: dict[str, object]) -> list[str]:
    """YAML's words as Python's, such as `true`, where the option takes a boolean or None."""
    translated, flag = [], ""
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            prefix = flag + equals
        else:
            prefix, value = "", token
        hint = hints.get(flag[2:].replace("-", "_"))
        word = _WORDS.get(value.lower(), value)
        if type(None) in get_args(hint) if word == "None" else "bool" in str(hint):
            value = word
        translated.append(prefix + value)
    return translated


def _one_line(boxed: str) -> str:
    """The message of tyro's error box: its lines up to the first rule, joined."""
    message = []
    for line in boxed.splitlines()[1:]:  # the first is the title
        text = line.strip("│ ")
        if not set(text) <= set("─╰╯-"):
            message.append(text)
        elif message:  # a rule; where the terminal is ASCII there is one before the message too
            break
    # Our own checks name the field themselves; tyro puts the class before it.
    text = re.sub(r"^Error parsing (\w+: )?", "", " ".join(message))
    return text.rstrip(".") + "; see --help"


def _check_flags(cls: type, argv: list[str], source: str) -> None:
    """Refuses unknown flags with the nearest legal names, and flags given twice."""
    legal = set(_flag_hints(cls)) | (set() if source else {"help"})
    seen = set()
    for token in argv:
        if not re.match(r"--[A-Za-z]", token):
            continue
        name = token[2:].split("=")[0].replace("-", "_")
        if name not in legal:
            raise UserError(
                f"{source}unknown option {name}; nearest: {nearest(name, sorted(legal))}"
            )
        if name in seen:
            raise UserError(f"{source}option {name} is given twice; give it once")
        seen.add(name)


def _flag_hints(cls: type, prefix: str = "") -> dict[str, object]:
    """The type of every option by its dotted name."""
    found = {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            whole = hint is TrainConfig  # its options have no prefix
            found |= _flag_hints(hint, prefix if whole else f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hint
    return found


def _take_option(argv: list[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `--name value` or `--name=value`, and the arguments without it."""
    for place, token in enumerate(argv):
        flag, equals, value = token.partition("=")
        if flag != f"--{name}":
            continue
        used = 1
        if not equals:
            value, used = "".join(argv[place + 1 : place + 2]), 2
        if not value or value.startswith("--"):
            raise UserError(f"--{name} needs a value")
        rest = argv[:place] + argv[place + used :]
        if any(other.partition("=")[0] == flag for other in rest):
            raise UserError(f"option {name} is given twice; give it once")
        return value, rest
    return None, argv


class _UniqueKeyLoader(yaml.BaseLoader):
    """Keeps scalars as text (the typed parser reads them) and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"key {key} is given twice")
        return super().construct_mapping(node, deep)


def _yaml_flags(path: Path) -> list[str]:
    """The flags that say the same as a YAML file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise UserError(f"configuration file {path} does not exist") from None
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{path}: {error}") from None
        raise UserError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if tree in (None, ""):
        return []
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected options as `key: value`, found a {type(tree).__name__}")
    sections = {flag.rsplit(".", 1)[0] for flag in _flag_hints(TrainConfig) if "." in flag}
    flags = []
    try:
        options = flatten(tree)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for name, value in options.items():
        if name in sections and not value:  # a section whose options are all commented out
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(scalar, str) for scalar in values):
            raise UserError(f"{path}: {name} must be a value or a list of values")
        values = [scalar or "None" for scalar in values]
        # `=` keeps a value that starts with a dash from being read as a flag.
        flags += [f"--{name}", *values] if isinstance(value, list) else [f"--{name}={values[0]}"]
    return flags


def flatten(tree: dict, prefix: str = "") -> dict:
    """Nested values as one level, by dotted names such as `optimizer.lr`."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            inner = flatten(value, f"{prefix}{key}.")
        else:
            inner = {prefix + key: value}
        if twice := flat.keys() & inner.keys():
            raise UserError(f"key {min(twice)} is given twice")
        flat |= inner
    return flat
