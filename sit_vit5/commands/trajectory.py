"""Draws how noise becomes images: `python sample/trajectory.py --checkpoint RUN --classes 3 7`."""

from sit_vit5.config import TrajectoryConfig
from sit_vit5.config.parse import parse
from sit_vit5.utils.errors import UserError


def main(argv: list[str]) -> None:
    """Parse, load, solve, draw, save; the last line is the picture's path."""
    options = parse(TrajectoryConfig, argv)

    from sit_vit5.analysis.trajectory import (
        DEFAULT_FRAMES,
        denoising_path,
        draw_path_frames,
        draw_path_strip,
    )
    from sit_vit5.sampling import grid as pictures
    from sit_vit5.sampling.load import load
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import save_image

    processes = join_processes()
    loaded = load(options, processes.device, default_scale=2.0)
    out = pictures.picture_path(options.out, loaded, name="path")
    labels, names = pictures.rows(options.classes, loaded.class_names)
    labels = [label for label in labels for _ in range(options.images)]
    if len(labels) > options.batch_size:
        raise UserError(
            f"{len(labels)} images must be at most batch_size {options.batch_size}; ask for fewer "
            "classes or images, or raise batch_size"
        )
    shown = 2 * len(labels) * (options.frames or DEFAULT_FRAMES)  # x_t and the expected data
    pictures.check_drawing(shown, loaded, use="lower frames or images")
    path = denoising_path(loaded.generator, range(len(labels)), labels, frames=options.frames)
    title = pictures.title(loaded, options.weights)
    if not processes.is_main:
        return
    if pictures.moves(out):
        pictures.save_animation(out, draw_path_frames(path, names, title))
    else:
        names = [name for name in names for _ in range(options.images)]
        save_image(out, draw_path_strip(path, names, title))
    print(out)
