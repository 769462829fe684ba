"""What a training run will need: memory, time and disk, estimated without training anything."""

from sit_vit5.config.parse import parse_over_train
from sit_vit5.config.plan import PlanCommand


def main(argv: list[str]) -> None:
    """Parse, count, print."""
    options = parse_over_train(PlanCommand, argv)

    from sit_vit5.analysis.plan import make_plan
    from sit_vit5.analysis.plan_report import report

    print(report(options, make_plan(options)))
