"""Tiny autoencoders in folders and in a cache of the hub."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from autoencoders import BUILDERS, random_autoencoder
from torch import nn

# A commit hash.
REVISION = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    """Every sort, saved by diffusers."""
    root = tmp_path_factory.mktemp("autoencoders")
    for sort in BUILDERS:
        random_autoencoder(sort).save_pretrained(root / sort)
    return {sort: str(root / sort) for sort in BUILDERS}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Callable[..., str]:
    """Puts an autoencoder into an otherwise empty cache of the hub; nothing reaches the network."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)

    def add(repository: str, vae: nn.Module, subfolder: str = "") -> str:
        cached = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(REVISION)
        vae.save_pretrained(cached / "snapshots" / REVISION / subfolder)
        return REVISION

    return add
