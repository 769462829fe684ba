"""Processes: the launcher's rank, the division of a batch, joining the others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sit_vit5.utils.errors import UserError, brief, nearest_multiples

if TYPE_CHECKING:
    import torch


def launch_rank() -> int:
    """Rank the launcher gave this process, 0 without a legal one; usable before any set-up."""
    try:
        check_launcher_variables()
    except UserError:
        return 0
    return int(os.environ.get("RANK") or 0)


def check_launcher_variables() -> None:
    """Refuses ranks and counts that no launcher gives, such as a RANK left in the shell."""
    advice = "unset it, or start with accelerate launch or torchrun"
    numbers: dict[str, int] = {}
    for name, (least, most) in LAUNCHER_VARIABLES.items():
        text = os.environ.get(name, "").strip()
        if text == "" or (name, text) == ("LOCAL_RANK", "-1"):  # accelerate's default: none
            continue
        number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
        if not least <= number <= most:
            raise UserError(
                f"the environment variable {name} {brief(text, 40)} must be a number from {least} "
                f"to {most:,}; {advice}"
            )
        numbers[name] = number
    if "RANK" in numbers and "WORLD_SIZE" not in numbers:
        raise UserError(
            f"the environment variable RANK {numbers['RANK']} needs WORLD_SIZE; {advice}"
        )
    for rank, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers.get(rank, 0) >= numbers.get(count, 10**9):
            raise UserError(
                f"the environment variable {rank} {numbers[rank]} must be below {count} "
                f"{numbers[count]}; {advice}"
            )


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: micro-batch m of rank r holds one contiguous run of samples."""

    batch_size: int
    accumulation: int = 1
    processes: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        parts = self.processes * self.accumulation
        if self.batch_size < 1 or self.batch_size % parts:
            raise UserError(
                f"batch_size {self.batch_size} is not divisible by {self.processes} processes x "
                f"{self.accumulation} accumulation steps; "
                f"use {nearest_multiples(self.batch_size, parts)}"
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward pass on one process."""
        return self.batch_size // (self.processes * self.accumulation)

    def indices(self, micro: int) -> range:
        """Positions in the global batch of this rank's micro-batch `micro`."""
        start = (micro * self.processes + self.rank) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


@dataclass(frozen=True)
class Processes:
    """This process among the others of a sampling or evaluation command."""

    rank: int
    count: int
    device: torch.device
    wait: Callable[[], None]

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0


# What launchers set: the least and the largest value.
LAUNCHER_VARIABLES = {
    "WORLD_SIZE": (1, 10**6),
    "RANK": (0, 10**6),
    "LOCAL_WORLD_SIZE": (1, 10**6),
    "LOCAL_RANK": (0, 10**6),
    "MASTER_PORT": (0, 65_535),
}
# The other processes wait while the first one draws and saves, longer than the usual ten minutes.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
# For those who wait already: the ones that do not are the ones sought.
ROLL_CALL = timedelta(seconds=10)


def join_processes(*, minutes: float | None = None) -> Processes:
    """Joins the launcher's processes, or runs alone: `python` works as well as a launcher.

    minutes: how long they wait for one another, None: an hour; the first call's word counts.
    """
    # Imported here: accelerate and torch take seconds, and most users of this file need neither.
    from accelerate import PartialState

    check_launcher_variables()
    check_plain_launcher()
    patience = COLLECTIVE_TIMEOUT if minutes is None else timedelta(minutes=minutes)
    try:
        state = PartialState(cpu=no_accelerator(), timeout=patience)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the launcher's variables are incomplete: {reason}") from None
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise _not_joined(str(error), patience) from None
    check_joined(state.num_processes)

    def wait() -> None:
        with _told_apart():
            state.wait_for_everyone()

    return Processes(state.process_index, state.num_processes, state.device, wait)


def _not_joined(error: str, patience: timedelta) -> UserError:
    """The words for processes that did not all come up."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in error or "already in use" in error:
        return UserError(
            f"the processes cannot meet at {address}: the port is in use; stop what uses it, or "
            "choose another MASTER_PORT (accelerate launch --main_process_port)"
        )
    joined = re.search(r"(\d+)/(\d+) clients joined", error)
    if joined:
        what = f"{joined[1]} of {joined[2]} processes joined"
    elif "connect" in error:
        what = f"process 0 did not answer at {address}"
    else:
        what = f"not all {os.environ.get('WORLD_SIZE')} processes joined"
    return UserError(f"{what} within {patience.total_seconds():,.0f} s; see the others' last lines")


@contextmanager
def _told_apart() -> Iterator[None]:
    """A block in which processes meet: that one is lost becomes a line, a bug stays as it is."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        raise Lost("a connection broke" if "gloo" in str(error) else brief(error)) from None


class Lost(UserError):
    """Others do not come any more to where processes meet."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(
            f"the processes have lost one another: {reason}; a process is stuck or dead, see its "
            "own last lines"
        )


def alone() -> Processes:
    """A single process on the CPU, joined to no others: for the library and for tests."""
    import torch

    return Processes(0, 1, torch.device("cpu"), lambda: None)


def gather(values: list, processes: Processes) -> list:
    """The values of all processes, on each of them."""
    if processes.count == 1:
        return values
    from accelerate.utils import gather_object

    with _told_apart():
        return gather_object(values)


class HostSync:
    """Numbers that the processes' CPUs tell one another: no device is waited for.

    Built by all processes together. patience: how long they wait for one another; roll_call: and
    for an answer to who is missing.
    """

    def __init__(
        self,
        count: int,
        patience: timedelta = COLLECTIVE_TIMEOUT,
        *,
        roll_call: timedelta = ROLL_CALL,
    ):
        self.group = None
        if count > 1:
            from torch import distributed

            with _told_apart():
                self.group = distributed.new_group(backend="gloo", timeout=patience)
                # A group is of no use after a time-out; this one finds out who is missing.
                self.roll_call = distributed.new_group(backend="gloo", timeout=roll_call)
            self.roll_call_time = roll_call

    def largest(self, number: int) -> int:
        """The largest number of all processes, the same on all of them: a signal, a failure."""
        if self.group is None:
            return int(number)
        import torch
        from torch import distributed

        word = torch.tensor([int(number)])
        with self.kept_together():
            distributed.all_reduce(word, distributed.ReduceOp.MAX, group=self.group)
        return int(word)

    @contextmanager
    def kept_together(self) -> Iterator[None]:
        """A block in which processes meet: where one is lost, the others say which."""
        try:
            with _told_apart():
                yield
        except Lost as error:
            reason = (self.group and self._missing()) or error.reason
            raise UserError(f"{Lost(reason)}; continue the run with --resume") from None

    def _missing(self) -> str | None:
        """Which processes do not answer any more; the first one finds out."""
        from torch import distributed

        try:
            distributed.monitored_barrier(self.roll_call, self.roll_call_time, wait_all_ranks=True)
        except RuntimeError as error:
            found = re.search(r"Ranks ([\d, ]+) failed", str(error))
            return f"no answer from rank {found[1]}" if found else None
        return None


def _is_lost(error: Exception) -> bool:
    """Whether the network between processes failed, and not the work of this one."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)


@contextmanager
def agree(processes: Processes) -> Iterator[None]:
    """A block after which all processes go on, or all stop with the words of the one that failed.

    Without it the others would wait for it, and end with an error of the network's.
    """
    own = failure = None
    try:
        yield
    except (UserError, OSError) as error:
        own, failure = error, str(error)
    failures = [word for word in gather([failure], processes) if word is not None]
    if failures:
        raise own or UserError(failures[0])


def check_plain_launcher() -> None:
    """Refuses launcher settings that would change the run behind the configuration's back."""
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if _asks(f"ACCELERATE_USE_{engine}"):
            raise UserError(
                f"accelerate launch asks for {engine}, which is not supported; use DDP, or FSDP "
                "with fsdp_version 2"
            )
    if launcher_shards():
        _check_fsdp()
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UserError(
            f"accelerate launch asks for the dynamo backend {backend}; drop it, use --compile True"
        )


def launcher_shards() -> bool:
    """Whether `accelerate launch` was told to use FSDP."""
    return _asks("ACCELERATE_USE_FSDP")


def shard_ourselves() -> None:
    """Keeps accelerate from using its own FSDP, once the launcher's word is read."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def _check_fsdp() -> None:
    """Of the launcher's settings for FSDP only the version is taken; others must not be lost."""
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(
            f"accelerate launch asks for FSDP version {version}; use fsdp_version 2, as "
            "configs/accelerate/gpu8_fsdp2.yaml"
        )
    for setting, instead in (
        ("OFFLOAD_PARAMS", "--ema.device host keeps the averages off the GPU"),
        ("ACTIVATION_CHECKPOINTING", "use --activation-checkpointing True"),
    ):
        if _asks(f"FSDP_{setting}"):
            raise UserError(
                f"accelerate launch asks for fsdp_{setting.lower()}, which is not read; drop it, "
                f"{instead}"
            )


def _asks(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def no_accelerator() -> bool:
    """Whether only the CPU is there. accelerate must be told, or torchrun's processes run apart."""
    import torch

    return not any(
        backend.is_available() for backend in (torch.cuda, torch.backends.mps, torch.xpu)
    )


def check_joined(processes: int) -> None:
    """Refuses to go on if the launcher's processes did not find one another."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if processes != launched:
        raise UserError(
            f"the launcher started {launched} processes but this one joined {processes}; "
            "start with accelerate launch or torchrun, or unset WORLD_SIZE"
        )
