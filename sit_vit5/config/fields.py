"""Types of options: file paths and numbers with a range, and the check that enforces them."""

from __future__ import annotations

import math
import os
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from sit_vit5.utils.errors import UserError, choose

# Marks text that names a file or folder: the command line and YAML expand its `~`.
IS_PATH = "path"
FilePath = Annotated[str, IS_PATH]

# The largest values are far above any use known, and far below what takes a machine's memory.
Seed = Annotated[int, Ge(0), Lt(2**63)]
Steps = Annotated[int, Ge(1), Le(10**9)]
Interval = Annotated[int, Ge(0), Le(10**9)]
SolverSteps = Annotated[int, Ge(1), Le(10**6)]
BatchSize = Annotated[int, Ge(1), Le(2**16)]
Workers = Annotated[int, Ge(0), Le(256)]
ImageSize = Annotated[int, Ge(1), Le(2**14)]
NumImages = Annotated[int, Ge(1), Le(10**8)]
GuidanceScale = Annotated[float, Ge(0), Le(1000)]
Shift = Annotated[float, Ge(1e-6), Le(1e6)]
Tolerance = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Gt(0), Lt(1)]
EndDistance = Annotated[float, Gt(0), Lt(0.5)]
MOST_BLOCKS = 1024
NumClasses = Annotated[int, Ge(1), Le(10**6)]


def check_values(config: object, prefix: str = "") -> None:
    """Refuses values of a dataclass that their annotations exclude: numbers out of range or not
    finite, words outside a choice, texts that are empty or that no file system takes."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        else:
            _check_value(name, value, hints[field.name])


def _check_value(name: str, value: object, hint: object) -> None:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        _check_value(name, value, args[0])
        for bound in args[1:]:
            _check_bound(name, value, bound)
    elif origin in (Union, UnionType):
        if value is not None:
            (inner,) = (arg for arg in args if arg is not NoneType)
            _check_value(name, value, inner)
    elif origin is tuple:
        for number, item in enumerate(value):
            _check_value(name, item, args[0 if Ellipsis in args else number])
    elif origin is Literal:
        choose(name, value, dict.fromkeys(args))
    elif isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} {value} must be finite")


def _check_text(name: str, text: str) -> None:
    if text == "":  # an unset variable of the shell
        raise UserError(f"{name} needs a value")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(f"{name} {text} holds characters that no file name has") from None
    if "\0" in text:
        raise UserError(f"{name} {text} holds a NUL character; remove it")


def _check_bound(name: str, value: float, bound: object) -> None:
    if isinstance(bound, Ge) and not value >= bound.ge:
        raise UserError(f"{name} {value} must be at least {_number(bound.ge)}")
    if isinstance(bound, Gt) and not value > bound.gt:
        raise UserError(f"{name} {value} must be above {_number(bound.gt)}")
    if isinstance(bound, Le) and not value <= bound.le:
        raise UserError(f"{name} {value} must be at most {_number(bound.le)}")
    if isinstance(bound, Lt) and not value < bound.lt:
        raise UserError(f"{name} {value} must be below {_number(bound.lt)}")


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
