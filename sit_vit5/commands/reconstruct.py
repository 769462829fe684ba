"""rFID of a codec: `python evaluate/reconstruction.py --data DATA --codec.name sd-vae-ema ...`."""

from sit_vit5.config import ReconstructionConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, reconstruct, report; the last lines are the paths of JSON and picture."""
    options = parse(ReconstructionConfig, argv)

    from pathlib import Path

    from sit_vit5.evaluation.reconstruction import draw, reconstruct, report
    from sit_vit5.evaluation.report import check_results
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import write_json

    processes = join_processes()
    table, picture = (Path(options.out) / f"reconstruction.{kind}" for kind in ("json", "png"))
    check_results(table)
    result, shown = reconstruct(options, processes)
    if processes.is_main:
        write_json(table, result)
        if shown:  # else every one of them was a bad image
            draw(picture, shown)
        print(report(result), table, *([picture] if shown else []), sep="\n")
