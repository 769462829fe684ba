"""Log-likelihood of images: `python evaluate/likelihood.py --checkpoint RUN --data FOLDER`."""

from sit_vit5.cli import parse, run
from sit_vit5.config import LikelihoodConfig


def main(argv: list[str]) -> None:
    """Parse, measure, report; the last line is the path of the JSON."""
    options = parse(LikelihoodConfig, argv)

    from sit_vit5.checkpoint import open_checkpoint
    from sit_vit5.distributed import join_processes
    from sit_vit5.evaluation.report import check_results
    from sit_vit5.files import write_json
    from sit_vit5.likelihood import json_path, measure, report

    processes = join_processes()
    checkpoint = open_checkpoint(options.checkpoint)
    out = json_path(options, checkpoint.folder, checkpoint.state.step)
    check_results(out)
    result = measure(options, processes)
    if processes.is_main:
        write_json(out, result)
        print(report(result), out, sep="\n")


if __name__ == "__main__":
    run(main)
