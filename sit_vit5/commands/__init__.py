"""The commands: each module here parses its options, calls the packages below and prints.

Imports no torch, so that a command's `--help` and its refusals answer at once.
"""

from __future__ import annotations

from importlib import import_module

from sit_vit5.utils.errors import UserError, nearest

# Name: what it does. The module has the name with `_` for `-`.
COMMANDS = {
    "train": "train a flow-matching model, or continue a run",
    "grid": "draw a labelled grid of samples",
    "generate": "write many samples to samples.npz",
    "trajectory": "draw the way from noise to images",
    "interpolate": "draw images between seeds or classes",
    "evaluate": "compare samples with a reference: FID, sFID, IS, precision, recall",
    "reference": "make or inspect the statistics of real images",
    "sweep": "rank guidance scales and EMA weights",
    "calibrate": "find published values again before anything is trained",
    "likelihood": "log-likelihood of images",
    "attention": "draw attention maps and suppressed channels",
    "reconstruct": "rFID, PSNR, SSIM and LPIPS of an autoencoder",
    "inspect": "look at a data set or a latent cache",
    "encode": "encode a data set once, into a latent cache",
    "plan": "time, memory and disk of a training run",
    "models": "list models with parameters and FLOPs",
    "convert": "turn official weights into a checkpoint",
    "export": "write a checkpoint as a diffusers folder",
    "posthoc-ema": "make EMA weights of another width after training",
}

USAGE = "usage: python -m sit_vit5 COMMAND [OPTIONS]; every command has its own --help"


def main(argv: list[str]) -> int | None:
    """Run the command that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(
            USAGE, "", *(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()), sep="\n"
        )
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; nearest: {nearest(name, COMMANDS)}")
    return import_module(f"sit_vit5.commands.{name.replace('-', '_')}").main(rest)
