"""Draws images between seeds: `python sample/interpolate.py --checkpoint RUN --seeds 0 1`."""

from sit_vit5.config import InterpolateConfig
from sit_vit5.config.parse import parse


def main(argv: list[str]) -> None:
    """Parse, load, interpolate, draw, save; the last line is the picture's path."""
    options = parse(InterpolateConfig, argv)

    from sit_vit5.analysis import interpolation
    from sit_vit5.sampling import grid as pictures
    from sit_vit5.sampling.generator import find_classes
    from sit_vit5.sampling.load import load
    from sit_vit5.utils.distributed import join_processes
    from sit_vit5.utils.files import save_image

    processes = join_processes()
    loaded = load(options, processes.device, default_scale=2.0)
    out = pictures.picture_path(options.out, loaded, name="interpolation")
    labels, names = pictures.rows(options.classes, loaded.class_names)
    to_label = None
    if options.to_class is not None:
        (to_label,) = find_classes([options.to_class], loaded.class_names)
        names = [f"{name} to {loaded.class_names[to_label]}" for name in names]
    positions = interpolation.position_names(options.seeds, options.frames)
    pictures.check_drawing(len(positions) * len(labels), loaded, use="lower frames")
    images = interpolation.interpolate(
        loaded.generator,
        labels,
        to_label=to_label,
        seeds=options.seeds,
        frames=options.frames,
        batch_size=options.batch_size,
        progress=True,
    )
    shown = images, names, positions, pictures.title(loaded, options.weights)
    if not processes.is_main:
        return
    if pictures.moves(out):
        pictures.save_animation(out, interpolation.draw_interpolation_frames(*shown))
    else:
        save_image(out, interpolation.draw_interpolation_strip(*shown))
    print(out)
