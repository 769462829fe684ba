"""Options as text: read from a command line or YAML, checked one by one against their types.

tyro builds the configuration from what is checked here, so that every message about a value is in
the words of this project.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from sit_vit5.config.fields import IS_PATH
from sit_vit5.utils.errors import UserError, brief, nearest

# The part of Positional[T] that says so.
_POSITIONAL = get_args(Positional[str])[1]
# YAML's spellings of None.
_NONE = ("null", "Null", "NULL", "~")
# Longer texts are no numbers, and Python refuses to read them.
_LONGEST_NUMBER = 40


# Options that say where to write.
OUTPUTS = ("--out", "--to", "--output-dir", "--report.out", "--cache")
# What to do about an error of the system, by its number.
_REMEDIES = {
    errno.EEXIST: "it is a file; choose another folder",
    errno.ENOTDIR: "a part of it is a file; choose another path",
    errno.EISDIR: "it is a folder; choose a file",
    errno.ENOENT: "it does not exist, or cannot be made there; choose another path",
    errno.EACCES: "it needs permissions that you do not have; change them or choose another path",
    errno.EPERM: "the system does not permit it; choose another path",
    errno.EROFS: "the file system is read-only; choose another path",
    errno.ELOOP: "its links lead to one another; remove them or choose another path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ENOSPC: "the disk is full; free space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space and run the same command again",
    errno.EFBIG: "files may not become so large here; raise ulimit -f or choose another disk",
    errno.EMFILE: "too many files are open; raise ulimit -n or lower the number of workers",
    errno.ENFILE: "too many files are open on this machine; close some or lower the workers",
    errno.ENOTEMPTY: "the folder is not empty; choose another",
}


@dataclass(frozen=True)
class Given:
    """An option as given. values: texts; None is YAML's empty value. listed: as a YAML list."""

    name: str
    values: list[str | None]
    listed: bool = False


@dataclass(frozen=True)
class Option:
    """A field of a configuration as an option. hint: its type without Annotated and None."""

    hint: object
    optional: bool = False
    is_path: bool = False
    positional: bool = False
    required: bool = False

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.hint) is tuple


def options_of(cls: type, prefix: str = "", whole: type | None = None) -> dict[str, Option]:
    """Every option of a configuration by its dotted name; those of `whole` have no prefix."""
    options = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        required = field.default is MISSING and field.default_factory is MISSING
        option = replace(_option(hints[field.name]), required=required)
        if is_dataclass(option.hint):
            inner = prefix if option.hint is whole else f"{prefix}{field.name}."
            options |= options_of(option.hint, inner)
        else:
            options[prefix + field.name] = option
    return options


def _option(hint: object) -> Option:
    optional = is_path = positional = False
    while True:
        args = get_args(hint)
        if get_origin(hint) is Annotated:
            is_path |= IS_PATH in args[1:]
            positional |= _POSITIONAL in args[1:]
            hint = args[0]
        elif get_origin(hint) in (Union, UnionType):
            optional = True
            (hint,) = (arg for arg in args if arg is not NoneType)
        else:
            return Option(hint, optional, is_path, positional)


def read_arguments(argv: list[str], options: dict[str, Option]) -> list[Given]:
    """The options that a command line gives, positional ones by their names."""
    given: list[Given] = []
    loose = []
    place = 0
    while place < len(argv):
        flag, equals, value = argv[place].partition("=")
        place += 1
        if not re.match(r"--[A-Za-z]", flag):
            loose.append(argv[place - 1])
            continue
        name = flag[2:].replace("-", "_")
        option = find_option(name, options)
        values = [value] if equals else []
        if not equals:
            end = place
            while end < len(argv) and not re.match(r"--[A-Za-z]", argv[end]):
                end += 1
            end = end if option.many else min(end, place + 1)
            values, place = argv[place:end], end
        given.append(Given(name, values))
    return [*given, *_positional(loose, options, given[-1] if given else None)]


def _positional(loose: list[str], options: dict[str, Option], last: Given | None) -> list[Given]:
    """The positional options among what follows no flag."""
    given = []
    for name, option in options.items():
        if option.positional and loose:
            taken = len(loose) if option.many else 1
            given.append(Given(name, loose[:taken]))
            loose = loose[taken:]
    for text in loose:
        if re.match(r"-[^\d.]", text):
            raise UserError(f"unknown option {text}; options start with two dashes, see --help")
        after = f" after {last.name} {last.values[-1]}" if last and last.values else ""
        raise UserError(
            f"unexpected argument {text!r}{after}; options are given as --name value, see --help"
        )
    return given


def take(given: list[Given], name: str) -> tuple[str | None, list[Given]]:
    """The value of an option that holds one text, or None, and the other options."""
    own = [item for item in given if item.name == name]
    if not own:
        return None, given
    (argument, *_) = spell(own, {name: Option(str, is_path=True)})
    return argument.partition("=")[2], [item for item in given if item.name != name]


# Options by their former names; a saved configuration may still have those.
RENAMED = {"recompute": "activation_checkpointing"}


def find_option(name: str, options: dict[str, Option]) -> Option:
    """The option called `name`, or an error that names the nearest ones."""
    if name not in options and RENAMED.get(name) in options:
        raise UserError(f"option {name} is now called {RENAMED[name]}; use that name")
    if name not in options:
        raise UserError(f"unknown option {name}; nearest: {nearest(name, sorted(options))}")
    return options[name]


def spell(given: list[Given], options: dict[str, Option]) -> list[str]:
    """The given options as tyro's arguments, each value checked against its type."""
    arguments, positional, seen = [], [], set()
    for item in given:
        option = find_option(item.name, options)
        if item.name in seen:
            raise UserError(f"option {item.name} is given twice; give it once")
        seen.add(item.name)
        values = list(_spelled_values(item, option))
        if option.positional:
            positional += values
        elif option.many:
            arguments += [f"--{item.name}", *values]
        else:  # `=` keeps a value that starts with a dash from being read as a flag
            arguments.append(f"--{item.name}={values[0]}")
    return positional + arguments


def _spelled_values(item: Given, option: Option) -> Iterator[str]:
    """The values of an option in tyro's spelling."""
    kinds = [option.hint] * len(item.values)
    if option.many:
        args = get_args(option.hint)
        kinds = [_option(args[0]).hint] * len(item.values)
        if Ellipsis not in args and len(args) != len(item.values):
            raise UserError(
                f"{item.name} takes {len(args)} values, {len(item.values)} given: "
                f"{' '.join(map(str, item.values)) or 'none'}"
            )
    elif item.listed:
        values = ", ".join(map(str, item.values))
        raise UserError(f"{item.name} takes one value, not the list [{values}]")
    elif not item.values:
        raise UserError(f"{item.name} needs a value")
    for text, kind in zip(item.values, kinds, strict=True):
        if option.optional and (text is None or text in ("None", *_NONE)):
            yield "None"
        elif text is None:
            raise UserError(f"{item.name} has no value; give one, or remove the line")
        elif text == "":  # an unset variable of the shell
            raise UserError(f"{item.name} needs a value")
        else:
            yield _spelled(item.name, expand(text, item.name) if option.is_path else text, kind)


def expand(path: str, name: str) -> str:
    """A path with `~` as the home folder, which a shell expands only at the start of a word."""
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{name} {path}: no such home folder; write ./{path} for a name with ~")
    return expanded


def _spelled(name: str, text: str, kind: object) -> str:
    """One value in tyro's spelling, or an error that says what the option takes."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} {text} must be True or False")
        return text.capitalize()
    if kind is int:
        return str(whole_number(name, text))
    if kind is float:
        return str(_number(name, text))
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise UserError(f"{name} {text} must be one of {', '.join(get_args(kind))}")
    return text


def whole_number(name: str, text: str) -> int:
    """An integer, also as 4e5 or 400000.0."""
    if re.fullmatch(rf"[+-]?\d{{1,{_LONGEST_NUMBER}}}", text.replace("_", ""), re.ASCII):
        return int(text.replace("_", ""))
    number = _number(name, text, "a whole number")
    if not number.is_integer():  # nor are inf and nan
        reason = "is too large" if text.strip("+-0123456789") == "" else "is not a whole number"
        raise UserError(f"{name} {text} {reason}")
    return int(number)


def _number(name: str, text: str, what: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} {text} is not {what}") from None


def describe(error: OSError, argv: list[str]) -> str:
    """An error of the system: the option whose path it is about, the path, what to do."""
    reason = brief(error.strerror or error)
    remedy = _REMEDIES.get(error.errno or 0)
    if error.filename is None:
        return f"{reason}: {remedy}" if remedy else reason
    path = os.fsdecode(error.filename)
    return f"{option_of(path, argv)}{brief(path)}: {remedy or reason}"


def option_of(path: str, argv: list[str], *, among: tuple[str, ...] = ()) -> str:
    """The option of a command line that names a path, one inside it or around it, as `--out: `.

    among: flags that it may be; none given: any.
    """
    path, name = os.path.abspath(path), ""
    for token in argv:
        flag, equals, value = token.partition("=")
        name = flag if flag.startswith("--") else name
        if (flag.startswith("--") and not equals) or (among and name not in among):
            continue
        given = os.path.abspath(os.path.expanduser(value if equals else token))
        if name and (path.startswith(given) or given.startswith(path + os.sep)):
            return f"{name}: "
    return ""
