"""Memory: checked before work that needs much of it, and one line where it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sit_vit5.errors import UserError, brief


def check_memory(need: int, what: str, *, use: str) -> None:
    """Refuses to begin what takes more memory than is free. use: what the user can do."""
    free = free_memory()
    if need > free:
        raise UserError(
            f"{what} take {need / 1e9:,.1f} GB of memory, {free / 1e9:,.1f} GB are free; {use}"
        )


def free_memory() -> int:
    """Bytes that this process can still take, of the machine's and within its own limit."""
    # Imported here: most commands never ask.
    import psutil

    free = psutil.virtual_memory().available
    try:
        import resource
    except ImportError:  # Windows
        return free
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return free
    return max(min(free, limit - psutil.Process().memory_info().vms), 0)


@contextmanager
def memory_errors(use: str) -> Iterator[None]:
    """Turns the errors of numpy's and torch's allocators into one line that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        device = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
        if not (device or isinstance(error, MemoryError) or "allocate memory" in str(error)):
            raise
        raise UserError(f"not enough memory: {brief(error)}; {use}") from None
