"""Finds published values again: `python evaluate/calibrate.py --reference REF --weights FILE`."""

from sit_vit5.config import CalibrateConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, run what can run, report; the last lines are the verdict and the path of the JSON."""
    options = parse(CalibrateConfig, argv)

    from sit_vit5.evaluation.calibration import calibrate
    from sit_vit5.utils.distributed import join_processes

    calibrate(options, join_processes())
