"""Published values on ImageNet 256x256, and whether a result may be put beside them.

Rows of 2024 and later were checked in the papers' abstracts or in the authors' own README, those of
the ViT-5 paper in its table and figure 6. A value that could not be found stated there is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROTOCOL_SAMPLES, SHAPE, CLASSES = 50_000, (256, 256, 3), 1000


@dataclass(frozen=True)
class Published:
    """One row. guidance: as the source says it; score: Inception Score, None if not stated.

    labels: how they were drawn, where the source says it.
    """

    model: str
    training: str
    guidance: str
    fid: float
    source: str
    score: float | None = None
    labels: str = ""


_VIT5 = "arXiv 2602.08071"
_FIGURE = f"{_VIT5}, figure 6"
_EARLY = "400k steps"

PUBLISHED: tuple[Published, ...] = (
    Published(
        "UCGM-S on REPA-E's SiT-XL/1", "REPA-E's", "scale not stated, 40 steps", 1.06,
        "arXiv 2505.07447, abstract",
    ),
    Published(
        "SiT-XL/1, REPA, E2E-VAVAE", "800 epochs", "2.4 in an interval", 1.12,
        "arXiv 2504.10483, README", labels="balanced",
    ),
    Published(
        "DiT-DH-XL, RAE", "not stated", "with guidance", 1.13, "arXiv 2510.11690, abstract",
        labels="balanced",
    ),
    Published(
        "DDT-XL/2 (22en6de)", "not stated", "in an interval", 1.26, "arXiv 2504.05741, README"
    ),
    Published("LightningDiT-XL/1, VA-VAE", "800 epochs", "in an interval", 1.35,
              "arXiv 2501.01423, README"),
    Published("SiT-XL/2 + REG", "4M steps", "in an interval", 1.36, "arXiv 2507.01467, README"),
    Published("SiT-XL/2 + REPA", "4M steps", "1.8 in an interval", 1.42,
              "arXiv 2410.06940, README"),
    Published("ViT-5-XL/2", "7M steps", "1.5", 1.84, _VIT5, 282.7),
    Published("SiT-XL/2", "7M steps", "1.5", 2.06, _VIT5, 277.5),
    Published("DiT-XL/2", "7M steps", "1.5", 2.27, "arXiv 2212.09748, README", 278.2),
    Published("DiT-DH-XL, RAE", "not stated", "none", 1.51, "arXiv 2510.11690, abstract",
              labels="balanced"),
    Published("SiT-XL/1, REPA, E2E-VAVAE", "800 epochs", "none", 1.69,
              "arXiv 2504.10483, README", labels="balanced"),
    Published("ViT-5-XL/2", _EARLY, "none", 14.6, _FIGURE),
    Published("ViT-5-L/2", _EARLY, "none", 17.0, _FIGURE),
    Published("SiT-XL/2", _EARLY, "none", 17.1, _FIGURE),
    Published("SiT-L/2", _EARLY, "none", 18.8, _FIGURE),
    Published("ViT-5-B/2", _EARLY, "none", 29.0, _FIGURE),
    Published("SiT-B/2", _EARLY, "none", 33.0, _FIGURE),
    Published("ViT-5-S/2", _EARLY, "none", 47.7, _FIGURE),
    Published("SiT-S/2", _EARLY, "none", 56.0, _FIGURE),
)  # fmt: skip


def is_of_imagenet(result: dict) -> bool:
    """Whether a result is one of Inception's features on ImageNet at 256x256.

    Told by 1,000 class names in the manifest, or by the reference's name.
    """
    if result["extractor"]["features"] != "inception" or tuple(result["image_shape"]) != SHAPE:
        return False
    names = (result["manifest"] or {}).get("class_names", ())
    return len(names) == CLASSES or "imagenet" in Path(result["reference"]).name.lower()


def differences(result: dict) -> list[str]:
    """What sets a result apart from the protocol of the published values."""
    said = []
    if result["count"] != PROTOCOL_SAMPLES:
        said.append(
            f"{result['count']:,} samples instead of {PROTOCOL_SAMPLES:,}: fewer give a larger FID"
        )
    drawn = ((result["manifest"] or {}).get("settings") or {}).get("labels")
    if drawn is None:
        said.append("how the labels were drawn is not known")
    elif drawn != "random":
        said.append(f"labels {drawn}: those of DiT, SiT and ViT-5 are drawn at random")
    if result["reference_count"] is None:
        said.append(
            f"the images behind the statistics of {Path(result['reference']).name} are not told: "
            "published values are against the whole training set"
        )
    elif result["reference_count"] < PROTOCOL_SAMPLES:
        said.append(
            f"a reference of {result['reference_count']:,} images instead of the training set's "
            "1,281,167"
        )
    return said
