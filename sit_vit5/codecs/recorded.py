"""The codec of a latent cache as its index records it, without its network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sit_vit5.codecs.normalisation import Normalisation, draw_latents
from sit_vit5.errors import UserError

if TYPE_CHECKING:
    from sit_vit5.codecs import Codec


@dataclass(frozen=True)
class RecordedCodec:
    """Enough to train on cached moments; pixels need the codec itself.

    name: its key in `CODECS`. origin: where its weights came from (a hub id and revision, or a
    folder), which is for people and is not compared.
    """

    name: str
    identity: dict
    draws_noise: bool
    origin: dict

    @classmethod
    def of(cls, codec: Codec, name: str) -> RecordedCodec:
        """What is worth recording of a codec."""
        return cls(name, codec.identity, codec.draws_noise, codec.origin)

    @classmethod
    def read(cls, record: dict) -> RecordedCodec:
        """The codec that `record` wrote."""
        types = {"name": str, "identity": dict, "draws_noise": bool, "origin": dict}
        if record.keys() != types.keys() or not all(
            isinstance(record[key], kind) for key, kind in types.items()
        ):
            raise UserError(f"{record} does not describe a codec; encode again")
        return cls(**record)

    def record(self) -> dict:
        """As JSON values."""
        return asdict(self)

    def latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Normalised latents (B, c, h, w)."""
        noise = noise if self.draws_noise else None
        return draw_latents(moments, noise, Normalisation.of(self.identity))
