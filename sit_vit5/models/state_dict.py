"""State dicts, checked strictly before they are loaded."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from sit_vit5.errors import UserError


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], source: Path, *, assign: bool = False
) -> None:
    """Loads all weights, or says which names or shapes of `source` do not fit.

    assign: the network keeps the tensors themselves, as one built on the meta device needs.
    """
    check_tensors(weights, model.state_dict(), source)
    model.load_state_dict(weights, assign=assign)


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], source: Path) -> None:
    """Refuses tensors of other names or shapes, with up to three names of each kind."""
    kinds = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [key for key in found if key not in expected],
        "misshapen": [
            f"{key} {tuple(found[key].shape)} for {tuple(tensor.shape)}"
            for key, tensor in expected.items()
            if key in found and found[key].shape != tensor.shape
        ],
    }
    wrong = [f"{len(keys)} {kind} ({brief(keys)})" for kind, keys in kinds.items() if keys]
    if wrong:
        raise UserError(f"weights of {source} do not fit the model: {'; '.join(wrong)}")


def brief(names: list[str]) -> str:
    """The first three of a list, as text."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
