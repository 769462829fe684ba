"""Every metric by its name. A new one is one file and one line here."""

from __future__ import annotations

from sit_vit5.metrics.fid import FID, SFID
from sit_vit5.metrics.inception_score import IS
from sit_vit5.metrics.kid import KID
from sit_vit5.metrics.metric import Metric
from sit_vit5.metrics.precision_recall import PRECISION_RECALL

METRICS: dict[str, Metric] = {
    "fid": FID,
    "sfid": SFID,
    "is": IS,
    "precision_recall": PRECISION_RECALL,
    "kid": KID,
}
