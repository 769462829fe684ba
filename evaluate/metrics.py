"""Compares samples with a reference: `python evaluate/metrics.py samples.npz --reference REF`."""

from sit_vit5.cli import parse, run
from sit_vit5.config import MetricsConfig


def main(argv: list[str]) -> None:
    """Parse, measure, report; the last line is the path of the JSON."""
    options = parse(MetricsConfig, argv)

    from sit_vit5.distributed import join_processes
    from sit_vit5.evaluation.evaluate import evaluate
    from sit_vit5.evaluation.report import json_path, report
    from sit_vit5.files import check_output, write_json

    out = json_path(options)
    check_output(out)
    processes = join_processes()
    result = evaluate(options, processes=processes)
    if processes.is_main:
        print(report(result))
        write_json(out, result)
        print(out)


if __name__ == "__main__":
    run(main)
