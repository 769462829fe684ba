"""Metrics of samples while a run trains, on all its processes; made by code above this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sit_vit5.models.denoiser import Denoiser
from sit_vit5.utils.distributed import HostSync, Processes, gather
from sit_vit5.utils.errors import UserError

Stopped = Callable[[], bool]


class BrokenOff(UserError):
    """A signal came during an evaluation."""


class Evaluation(Protocol):
    """Draws samples of a network and compares them with a reference."""

    def share(self, network: Denoiser, processes: Processes, stopped: Stopped) -> Any:
        """This process's part of the samples, as what can be sent to another; it may fail.

        stopped: asked between batches; once it is true, what is returned does not matter.
        """

    def values(self, shares: list[Any]) -> dict[str, float]:
        """Metrics by their names of the parts of all processes, in order of their ranks."""


def evaluate(
    evaluation: Evaluation,
    copy: Callable[[], Denoiser],
    processes: Processes,
    words: HostSync,
    *,
    stopped: Stopped,
) -> dict[str, float]:
    """The metrics, on the first process; {} elsewhere. Every process must ask.

    copy: makes the network, for which there may be no memory.

    Raises a UserError on every process if any failed, on the first if the metrics did: an
    evaluation is not worth a run, so the caller says it and goes on.
    """
    share, failure = None, ""
    try:
        share = evaluation.share(copy(), processes, stopped)
    except Exception as error:  # of any kind: out of memory, non-finite images
        failure = _words_of(error)
    if words.largest(stopped()):
        raise BrokenOff("broken off by a signal")
    failures = [word for word in gather([failure], processes) if word]
    if failures:
        raise UserError(failures[0])
    shares = gather([share], processes)
    if not processes.is_main:
        return {}
    try:
        return evaluation.values(shares)
    except Exception as error:  # of any kind: too few images for a metric, no memory
        raise UserError(_words_of(error)) from None


def _words_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
