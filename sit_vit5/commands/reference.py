"""References: `python evaluate/reference.py make DATA --out REF.npz`, `... inspect FILE`."""

from sit_vit5.config import REFERENCE_COMMANDS, InspectReferenceConfig, MakeReferenceConfig
from sit_vit5.config.parse import parse
from sit_vit5.utils.errors import UserError

USAGE = "usage: evaluate/reference.py make DATA --out REF.npz, or inspect FILE"


def main(argv: list[str]) -> int:
    """Parse, make or inspect; 1 for a file whose statistics are damaged."""
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}; each has its own --help")
        return 0
    if not argv or argv[0] not in REFERENCE_COMMANDS:
        raise UserError(f"expected make or inspect first; {USAGE}")
    options = parse(REFERENCE_COMMANDS[argv[0]], argv[1:])
    return make(options) if isinstance(options, MakeReferenceConfig) else inspect_file(options)


def make(options: MakeReferenceConfig) -> int:
    """Makes a reference; the last line is its path."""
    from sit_vit5.evaluation.references import describe_file, make_reference
    from sit_vit5.metrics.reference import read_reference
    from sit_vit5.utils.distributed import join_processes

    processes = join_processes()
    path = make_reference(options, processes)
    if processes.is_main:
        print(*describe_file(read_reference(path)), path, sep="\n")
    return 0


def inspect_file(options: InspectReferenceConfig) -> int:
    """Prints what is in a file."""
    from sit_vit5.evaluation.references import inspect

    text, sound = inspect(options.file)
    print(text)
    return 0 if sound else 1
