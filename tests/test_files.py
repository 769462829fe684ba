"""Files of ours: JSON is checked against a type before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge

from sit_vit5.errors import UserError
from sit_vit5.files import read_json


@dataclass(frozen=True)
class Facts:
    step: Annotated[int, Ge(0)]
    size: tuple[int, int]
    names: tuple[str, ...] = ()
    scale: float | None = None


def read(tmp_path: Path, text: str | bytes) -> Facts:
    path = tmp_path / "facts.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_json(path, Facts, remedy="make it again")


def test_read_json_gives_the_dataclass(tmp_path):
    facts = read(tmp_path, '{"step": 3, "size": [4, 5], "names": ["a"], "scale": 1, "new": 0}')
    assert facts == Facts(3, (4, 5), ("a",), 1.0)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[" * 100_000, "recursion"),
        ("", "Expecting value"),
        (b"\xff\xfe", "not UTF-8"),
        ("[]", "dictionary|object"),
        ('{"size": [1, 2]}', "step: Field required"),
        ('{"step": 1.0, "size": [1, 2]}', "step: .*integer"),
        ('{"step": "1", "size": [1, 2]}', "step: .*integer"),
        ('{"step": -1, "size": [1, 2]}', "step: .*greater than or equal to 0"),
        ('{"step": 1, "size": [1, "x"]}', "size.1: .*integer"),
        ('{"step": 1, "size": [1, 2], "scale": NaN}', "NaN is not a JSON number"),
        ('{"step": 1, "size": [1, 2], "names": ["\\ud800"]}', "hex escape|surrogate"),
    ],
)
def test_read_json_refuses_damage_in_one_line(tmp_path, text, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        read(tmp_path, text)
    assert str(refusal.value).endswith("; make it again")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_read_json_names_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "absent.json")
