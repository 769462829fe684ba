"""Compares samples with a reference: `python evaluate/metrics.py samples.npz --reference REF`."""

from sit_vit5.config import MetricsConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, measure, report; the last lines are the paths of the page and of the JSON."""
    options = parse(MetricsConfig, argv)

    from sit_vit5.evaluation.evaluate import examine
    from sit_vit5.evaluation.page import write_page
    from sit_vit5.evaluation.report import check_results, json_path, page_path, report
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import write_json

    out = json_path(options)
    page = page_path(options, out)
    check_results(out, page)
    processes = join_processes()
    evaluation = examine(options, processes=processes)
    if processes.is_main:
        write_json(out, evaluation.result)
        if page:
            write_page(page, evaluation, options=options.report, seed=options.seed)
        print(report(evaluation.result), *filter(None, (page, out)), sep="\n")
