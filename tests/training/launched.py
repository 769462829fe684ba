"""Several runs of train_sit.py, one after another, in processes that a launcher started once.

Takes their options as a JSON list of lists; a word NAME=VALUE among them is an environment variable
from there on, as of a launcher.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(runs: list[list[str]]) -> None:
    """Runs all of them; each must end well."""
    sys.path.insert(0, str(ROOT))
    train = runpy.run_path(str(ROOT / "train_sit.py"))["main"]
    for argv in runs:
        os.environ |= dict(
            word.split("=") for word in argv if not word.startswith("-") and "=" in word
        )
        assert train([word for word in argv if word.startswith("-") or "=" not in word]) == 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
