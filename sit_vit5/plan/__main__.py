"""Estimates a training run: `python -m sit_vit5.plan --config FILE --gpus 8 --device h200`."""

from sit_vit5.cli import parse_over_train, run
from sit_vit5.plan.options import PlanCommand


def main(argv: list[str]) -> None:
    """Parse, count, print."""
    options = parse_over_train(PlanCommand, argv)

    from sit_vit5.plan.estimate import make_plan
    from sit_vit5.plan.report import report

    print(report(options, make_plan(options)))


if __name__ == "__main__":
    run(main)
