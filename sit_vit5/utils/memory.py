"""Memory: checked before work that needs much of it, and one line where it runs out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sit_vit5.utils.errors import UserError, brief, size_text

if TYPE_CHECKING:
    import torch


# A container's limit, https://docs.kernel.org/admin-guide/cgroup-v2.html
_CGROUP = Path("/sys/fs/cgroup/memory.max")
# An allocator's or the data loader's words where no exception type says so.
_RAN_OUT = re.compile(
    r"can't allocate memory|(not enough|out of) memory|DataLoader worker .* (Killed|Bus error)",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)")


def check_memory(need: int, what: str, *, use: str, device: torch.device | None = None) -> None:
    """Refuse work that takes more memory than is free. use: what the user can do.

    device: whose memory it takes; None or a CPU: the host's. Of a GPU all of it counts.
    """
    where, free = "is free", free_memory()
    if device is not None and device.type == "cuda":
        import torch

        where, free = "is on the GPU", torch.cuda.get_device_properties(device).total_memory
    if need > free:
        raise UserError(
            f"{what} takes {size_text(need)} of memory, {size_text(free)} {where}; {use}"
        )


def free_memory() -> int:
    """Bytes that this process can still take: of the machine, its container and its own limit."""
    # Imported here: most commands never ask.
    import psutil

    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no container; a limit of "max"
        free.append(int(_CGROUP.read_text()))
    with contextlib.suppress(ImportError):  # Windows
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            free.append(limit - psutil.Process().memory_info().vms)
    return max(min(free), 0)


def out_of_memory(error: BaseException) -> str | None:
    """The message for an allocation that failed; None for any other error."""
    if not isinstance(error, MemoryError) and not _RAN_OUT.search(str(error)):
        return None
    found = _AMOUNT.search(str(error))
    asked = f" (tried to allocate {found[1]} {found[2]})" if found else ""
    return (
        f"memory ran out{asked}; lower what this command takes, such as batch_size, the size of "
        "the images, the model's width and depth, or data.workers"
    )


@contextmanager
def memory_errors(use: str) -> Iterator[None]:
    """Turn an allocation that fails inside the context into one line. use: what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error) is None:
            raise
        raise UserError(f"not enough memory: {brief(error)}; {use}") from None
