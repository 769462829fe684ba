"""The codec of a latent cache as its index records it, without its network."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Predicate
from torch import Tensor

from sit_vit5.codecs.autoencoder import Normalisation, draw_latents
from sit_vit5.config import CodecConfig
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.files import parse_json

if TYPE_CHECKING:
    from sit_vit5.codecs import Codec


def _tells_a_codec(identity: dict) -> bool:
    name = identity.get("name")
    return isinstance(name, str) and name != "" and Normalisation.of(identity).usable


@dataclass(frozen=True)
class RecordedCodec:
    """Enough to train on cached moments; pixels need the codec itself.

    name: its key in `CODECS`. origin: where its weights came from (a hub id and revision, or a
    folder), which is for people and is not compared.
    """

    name: str
    identity: Annotated[dict, Predicate(_tells_a_codec)]
    draws_noise: bool
    origin: dict

    @classmethod
    def of(cls, codec: Codec, name: str) -> RecordedCodec:
        """Record of a codec in a latent cache."""
        return cls(name, codec.identity, codec.draws_noise, codec.origin)

    @classmethod
    def read(cls, record: dict, *, channels: int) -> RecordedCodec:
        """The codec that `record` wrote. channels: of the latents it normalises."""
        found = parse_json(
            json.dumps(record), cls, source="the codec of the latent cache", remedy="encode again"
        )
        if not Normalisation.of(found.identity).fits(channels):
            raise UserError(
                f"the codec of the latent cache normalises other than {channels} channels; encode "
                "again"
            )
        return found

    def normalised_by(self, config: CodecConfig) -> RecordedCodec:
        """The codec with the scale and shift of the configuration, where it gives any."""
        if config.scale is None and config.shift is None:
            return self
        own = Normalisation.of(self.identity)
        if len(own.scale) > 1:
            raise UserError(
                "codec.scale and codec.shift have no effect on a latent cache whose codec "
                "normalises every channel by its own statistics; drop them, or encode again"
            )
        scale = own.scale if config.scale is None else (config.scale,)
        shift = own.shift if config.shift is None else (config.shift,)
        kept = {key: value for key, value in self.identity.items() if key != "shift"}
        return replace(self, identity=kept | Normalisation(scale, shift).record())

    def record(self) -> dict:
        """As JSON values."""
        return asdict(self)

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Normalised latents (B, c, h, w)."""
        noise = noise if self.draws_noise else None
        return draw_latents(moments, noise, Normalisation.of(self.identity))
