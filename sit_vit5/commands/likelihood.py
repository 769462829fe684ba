"""Log-likelihood of images: `python evaluate/likelihood.py --checkpoint RUN --data FOLDER`."""

from sit_vit5.config import LikelihoodConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, measure, report; the last line is the path of the JSON."""
    options = parse(LikelihoodConfig, argv)

    from sit_vit5.evaluation.likelihood import json_path, measure, report
    from sit_vit5.evaluation.report import check_results
    from sit_vit5.models.checkpoint import open_checkpoint
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import write_json

    processes = join_processes()
    checkpoint = open_checkpoint(options.checkpoint)
    out = json_path(options, checkpoint.folder, checkpoint.state.step)
    check_results(out)
    result = measure(options, processes)
    if processes.is_main:
        write_json(out, result)
        print(report(result), out, sep="\n")
