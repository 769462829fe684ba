"""Draws a labelled grid of samples: `python sample/grid.py --checkpoint runs/digits/latest`."""

from sit_vit5.config import GridConfig
from sit_vit5.config.parse import parse
from sit_vit5.utils.errors import UserError


def main(argv: list[str]) -> None:
    """Parse, load, draw, save; the last line is the picture's path."""
    options = parse(GridConfig, argv)
    if options.out and not options.out.lower().endswith(".png"):
        raise UserError(f"--out {options.out} must end in .png")

    from sit_vit5.sampling.generator import find_classes
    from sit_vit5.sampling.grid import picture_path, sample_grid, title
    from sit_vit5.sampling.load import load
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import save_image

    processes = join_processes()
    loaded = load(options, processes.device, default_scale=2.0)
    out = picture_path(options.out, loaded, name="grid")
    wanted = find_classes(options.classes, loaded.class_names)
    wanted = wanted if options.classes else wanted[:10]
    grid = sample_grid(
        {title(loaded, options.weights): loaded.generator},
        classes=wanted,
        class_names=loaded.class_names,
        columns=options.columns,
        batch_size=options.batch_size,
        progress=True,
    )
    if processes.is_main:
        save_image(out, grid)
        print(out)
