"""Compares samples with a reference: `python evaluate/metrics.py samples.npz --reference REF`."""

from sit_vit5.cli import parse, run
from sit_vit5.config import MetricsConfig


def main(argv: list[str]) -> None:
    """Parse, measure, report; the last line is the path of the JSON."""
    options = parse(MetricsConfig, argv)

    from sit_vit5.evaluation import evaluate, report, save_report

    result = evaluate(options)
    print(report(result))
    print(save_report(result, options))


if __name__ == "__main__":
    run(main)
