"""YAML files as options."""

from __future__ import annotations

import stat
from collections import Counter
from operator import itemgetter
from pathlib import Path

import yaml

from sit_vit5.config.flags import Given, Option
from sit_vit5.utils.errors import UserError, brief

# Configurations are a few KB; what is larger is another file.
LARGEST_FILE = 1 << 20


class _Loader(yaml.BaseLoader):
    """Keeps scalars as text, an empty one as None, and refuses aliases and keys given twice."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            name = self.peek_event().anchor
            raise UserError(f"alias *{name} is not supported; write the value out")
        return super().compose_node(parent, index)

    def construct_scalar(self, node):
        # `name: ''` is an empty text; `name:` is no value.
        empty = isinstance(node, yaml.ScalarNode) and not node.value and node.style is None
        return None if empty else super().construct_scalar(node)

    def construct_mapping(self, node, deep=False):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        key, count = max(keys.items(), key=itemgetter(1), default=("", 0))
        if count > 1:
            raise UserError(f"key {key} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, options: dict[str, Option]) -> list[Given]:
    """The options in a file of `name: value`, nested or with dotted names."""
    tree = _load(path)
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise UserError(f"expected options as `key: value`, found a {type(tree).__name__}")
    sections = {name.rsplit(".", 1)[0] for name in options if "." in name}
    given = []
    for name, value in flatten(tree).items():
        if name in sections and not value:  # a section whose options are all commented out
            continue
        values = value if isinstance(value, list) else [value]
        if not all(scalar is None or isinstance(scalar, str) for scalar in values):
            raise UserError(f"{name} must be a value or a list of values")
        given.append(Given(name, values, listed=isinstance(value, list)))
    return given


def _load(path: Path) -> object:
    """The content of a file: dicts, lists, texts and None."""
    try:
        if not stat.S_ISREG((status := path.stat()).st_mode):
            raise UserError("it is not a regular file")
        if status.st_size > LARGEST_FILE:
            raise UserError(f"it has {status.st_size:,} bytes; a configuration is far smaller")
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"not a YAML file: {brief(error)}") from None


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
