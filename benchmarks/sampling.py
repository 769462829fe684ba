"""What sampling costs beyond its network calls: `python benchmarks/sampling.py`.

Prints, each as a ratio measured in one run: the solver loop over the bare network calls; guidance
in an interval over what its passes cost; and how far bf16 images are from fp32 ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from timing import medians
from torch import nn

from sit_vit5.codecs import build_codec
from sit_vit5.config import SdeConfig, presets
from sit_vit5.flow.predictions import Flow
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.field import Guidance
from sit_vit5.sampling.generator import Generator, Settings


def main() -> None:
    """Parses and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT5-B/2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    made = generator(options)
    overhead(made, options)
    interval(made, options)
    precision(made, options)


def generator(options: argparse.Namespace) -> Generator:
    """A generator of random weights on 32x32x4 latents, decoded by nothing."""
    torch.manual_seed(0)
    model = Denoiser(
        presets.backbone(options.model), in_channels=4, input_size=(32, 32), num_classes=1000
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model = model.to(options.device).eval().requires_grad_(False)
    settings = Settings(method="euler", steps=options.steps)
    return Generator(model, build_codec("identity"), Flow("linear", "velocity"), settings)


def overhead(made: Generator, options: argparse.Namespace) -> None:
    """The loop against its own network calls."""
    indices = range(options.batch)
    for name, settings in (
        ("euler", made.settings),
        ("euler_maruyama", Settings("euler_maruyama", steps=options.steps, sde=SdeConfig())),
    ):
        loop = replace(made, settings=settings)
        field, _ = loop.field(torch.zeros(options.batch, dtype=torch.long, device=options.device))
        noise = loop.noise("sample", indices).to(options.device)
        labels = torch.zeros(options.batch, dtype=torch.long, device=options.device)
        t = torch.full((options.batch,), 0.5, device=options.device)

        def bare(noise=noise, t=t, labels=labels) -> None:
            for _ in range(options.steps):
                made.model(noise, t, labels)

        whole, calls = taking_turns(
            [lambda loop=loop, f=field, n=noise: loop.solve(f, n, indices), bare], options
        )
        print(
            f"{options.model} batch {options.batch}, {name}, {options.steps} steps: {whole:.3f} s, "
            f"bare network calls {calls:.3f} s, overhead {whole / calls - 1:+.2%}"
        )


def interval(made: Generator, options: argparse.Namespace) -> None:
    """Guidance in half of the steps against guidance in all and in none."""
    labels = torch.zeros(options.batch, dtype=torch.long, device=options.device)
    indices = range(options.batch)
    noise = made.noise("sample", indices).to(options.device)
    runs, passes = [], []
    for guidance in (Guidance(), Guidance(2.0), Guidance(2.0, interval=(0.5, 1.0))):
        guided = replace(made, settings=replace(made.settings, guidance=guidance))
        field, networks = guided.field(labels)
        guided.solve(field, noise, indices)
        passes.append(networks[0].passes)
        runs.append(lambda g=guided, f=field: g.solve(f, noise, indices))
    off, on, half = taking_turns(runs, options)
    expected = off + (on - off) * (passes[2] - passes[0]) / (passes[1] - passes[0])
    print(
        f"guidance off {off:.3f} s ({passes[0]} passes), on {on:.3f} s ({passes[1]}), in [0.5, 1] "
        f"{half:.3f} s ({passes[2]}): {half / expected:.2f} of what its passes cost"
    )


def precision(made: Generator, options: argparse.Namespace) -> None:
    """uint8 differences between bf16 and fp32 sampling."""
    images = {}
    for name in ("fp32", "bf16"):
        chosen = replace(made, settings=replace(made.settings, precision=name, steps=25))
        images[name] = chosen(range(options.batch), [0] * options.batch).pixels.int()
    difference = (images["bf16"] - images["fp32"]).abs()
    print(
        f"bf16 against fp32 after 25 steps: {(difference > 0).float().mean():.1%} of the values "
        f"differ, by {difference.float().mean():.3f} of 255 on average, {difference.max()} at most"
    )


@torch.inference_mode()
@torch.no_grad()
def taking_turns(runs: list[Callable[[], object]], options: argparse.Namespace) -> list[float]:
    """Median seconds of each call."""
    return medians(runs, repeats=options.repeats, device=options.device)


if __name__ == "__main__":
    main()
