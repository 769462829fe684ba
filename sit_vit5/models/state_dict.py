"""State dicts, checked strictly before they are loaded."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from sit_vit5.errors import UserError, listed


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], source: Path, *, assign: bool = False
) -> None:
    """Loads all weights, or says which names, shapes or types of `source` do not fit.

    assign: the network keeps the tensors themselves, as one built on the meta device needs.
    """
    check_tensors(weights, model.state_dict(), source)
    model.load_state_dict(weights, assign=assign)


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], source: Path) -> None:
    """Refuses tensors of other names, shapes or types, with up to three names of each kind."""
    shared = [key for key in expected if key in found]
    kinds = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [key for key in found if key not in expected],
        "misshapen": [
            f"{key} {tuple(found[key].shape)} for {tuple(expected[key].shape)}"
            for key in shared
            if found[key].shape != expected[key].shape
        ],
        "of another type": [
            f"{key} {found[key].dtype} for {expected[key].dtype}".replace("torch.", "")
            for key in shared
            if found[key].dtype != expected[key].dtype
        ],
    }
    wrong = [f"{len(keys)} {kind} ({listed(keys, most=3)})" for kind, keys in kinds.items() if keys]
    if wrong:
        raise UserError(f"weights of {source} do not fit the model: {'; '.join(wrong)}")
