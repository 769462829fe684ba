"""The preview grids of a run inside its page: the newest as data, older ones as links."""

from __future__ import annotations

import io
from functools import lru_cache
from html import escape
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from sit_vit5.page import data_url
from sit_vit5.run_folder import SAMPLES

EMBEDDED = 4
# A larger file is embedded as a JPEG of at most this width.
MOST_BYTES, MOST_WIDTH = 300_000, 1000


def grids(run: Path) -> str:
    """Figures and links, newest first."""
    paths = sorted((run / SAMPLES).glob("step_*.png"), key=_step, reverse=True)
    if not paths:
        return "<p>none drawn yet</p>"
    figures = [
        f"<figure><figcaption>step {_step(path):,}</figcaption>"
        f'<a href="{_link(path)}"><img alt="samples at step {_step(path)}" '
        f'src="{_data(path, path.stat().st_mtime_ns)}"></a></figure>'
        for path in paths[:EMBEDDED]
    ]
    links = [f'<a href="{_link(path)}">{_step(path):,}</a>' for path in paths[EMBEDDED:]]
    older = f"<p>older, beside this file: step {', '.join(links)}</p>" if links else ""
    return '<div class="grids">' + "\n".join(figures) + f"</div>{older}"


def _step(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0


def _link(path: Path) -> str:
    return escape(quote(f"{SAMPLES}/{path.name}"))


@lru_cache(maxsize=2 * EMBEDDED)
def _data(path: Path, changed: int) -> str:
    """A data URL of a picture; `changed`: when the file was, so that it is read once."""
    content, kind = path.read_bytes(), "png"
    if len(content) > MOST_BYTES:
        with Image.open(io.BytesIO(content)) as image:
            small = image.convert("RGB")
        small.thumbnail((MOST_WIDTH, 4 * MOST_WIDTH), Image.Resampling.LANCZOS)
        stream, kind = io.BytesIO(), "jpeg"
        small.save(stream, format="jpeg", quality=85)
        content = stream.getvalue()
    return data_url(content, kind)
