"""What the pages of a run and of an evaluation share: one file, without a script or a network."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
from PIL import Image

# Up to this side pixels are kept as they are, and enlarged in squares.
SMALL = 64
JPEG_QUALITY = 80

STYLE = """
:root { --paper: #fff; --card: #f5f6f8; --ink: #1c1f24; --soft: #646b76; --rule: #d9dde3;
  --accent: #2563c9; --good: #1a7f45; --bad: #b3261e; --warn: #9a5b00; --mark: #fff0b8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1d2127; --ink: #e6e8eb; --soft: #98a0ab; --rule: #343a43;
    --accent: #7fb0ff; --good: #5fd08f; --bad: #ff8a80; --warn: #f0b75a; --mark: #4d421a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px 16px 48px; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 36px 0 10px; }
header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; }
header p, figcaption, dt, th, .soft { color: var(--soft); font-size: .85rem; }
header p { margin: 0; }
dl { margin: 0; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.numbers div { background: var(--card); border-radius: 8px; padding: 8px 12px; }
.numbers dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.facts { margin-top: 14px; }
.facts div { display: flex; gap: 10px; }
.facts dt { flex: 0 0 70px; line-height: 1.6; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; min-width: 0; }
figcaption { margin-bottom: 4px; }
img { max-width: 100%; border-radius: 6px; }
a { color: var(--accent); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; font-weight: 500; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
pre { background: var(--card); border-radius: 8px; padding: 10px 12px; overflow-x: auto;
  font-size: .84rem; line-height: 1.5; margin: 8px 0; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 3px; }
summary { cursor: pointer; margin-top: 12px; }
"""


def document(*, title: str, style: str, body: str) -> str:
    """A whole page. title, body: HTML, escaped already; style: rules besides the shared ones."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{STYLE}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def definitions(facts: Mapping[str, object]) -> str:
    """The inside of a `dl`, a term and its text each; escapes both."""
    return "\n".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(str(text))}</dd></div>"
        for term, text in facts.items()
    )


def table(head: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """A table that scrolls on a narrow screen. head: titles; rows: of `row`; kind: its class."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    inside = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}">\n<tr>{titles}</tr>\n{inside}\n</table></div>'
    )


def row(cells: Iterable[str], *, kind: str = "") -> str:
    """A row of texts, which it escapes; kind: its class."""
    return f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def data_url(content: bytes, kind: str) -> str:
    """A picture's file as the address of itself. kind: png or jpeg."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def tile(pixels: np.ndarray, *, side: int, alt: str) -> str:
    """An `img` of uint8 (H, W, 1 or 3), shown `side` CSS pixels wide.

    A large image becomes a JPEG of at most `side` pixels, so that a page of many stays small.
    """
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    small = max(picture.size) <= SMALL
    stream = io.BytesIO()
    if small:
        picture.save(stream, format="png", optimize=True)
    else:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        picture.save(stream, format="jpeg", quality=JPEG_QUALITY, optimize=True)
    url = data_url(stream.getvalue(), "png" if small else "jpeg")
    kind = ' class="pixels"' if small else ""
    return f'<img{kind} width="{side}" alt="{escape(alt)}" src="{url}">'
