"""A plan in words."""

from __future__ import annotations

from sit_vit5.analysis.plan import CALLS, MARGIN, SAMPLES, Plan
from sit_vit5.config.plan import PlanCommand
from sit_vit5.config.presets import title
from sit_vit5.training.disk import disk_lines
from sit_vit5.utils.errors import size_text


def report(options: PlanCommand, plan: Plan) -> str:
    """The whole estimate with what it assumes."""
    config, latents = options.train, " x ".join(map(str, plan.encoding.latent_shape))
    classes = f"{plan.data.num_classes} classes" if plan.data.num_classes else "unconditional"
    lines = [
        f"estimate for {title(config.model, config.backbone)}, latents {latents}, {classes}, "
        f"{config.precision}, on {options.gpus} x {options.device}",
        "",
        *_work(plan),
        "",
        *_memory(options, plan),
        "",
        *disk_lines(config, plan.disk),
        "",
        *_time(options, plan),
        *_sampling(plan),
        "",
        "assumed:",
        *(f"- {line}" for line in _assumptions(options, plan)),
    ]
    return "\n".join(lines)


def _work(plan: Plan) -> list[str]:
    batch, images = plan.batch, plan.batch.batch_size
    tera, giga = plan.step_flops / 1e12, plan.flops / 1e9
    again = ", and once again in the backward pass" if plan.passes == 4 else ""
    lines = [
        f"parameters: {plan.parameters:,}, of them trainable {plan.trainable:,}",
        f"batch: {batch.micro_batch_size} per forward pass x {batch.processes} processes x "
        f"{batch.accumulation} accumulation steps = {images} images per step",
        f"FLOPs per step: {tera:,.4g} TFLOP = {plan.passes} x {giga:,.4g} GFLOP x "
        f"{images} images (forward once{again}, backward twice as much; 2 per multiply-add)",
    ]
    if plan.encoding.flops:
        lines.append(
            f"encoding, on top: {plan.encoding.flops * images / 1e12:,.4g} TFLOP = "
            f"{plan.encoding.flops / 1e9:,.4g} GFLOP x {images} images, in fp32"
        )
    return lines


def _memory(options: PlanCommand, plan: Plan) -> list[str]:
    memory, step = plan.memory, plan.memory.activations
    averages = len(options.train.ema.names)
    autocast = options.train.precision == "bf16"
    fixed = "bf16 copies of weights under autocast" if autocast else "rotary tables"
    items = [
        ("weights, fp32", memory.weights),
        ("gradients, fp32", memory.gradients),
        ("AdamW's two moments, fp32", memory.moments),
        (f"EMA, {averages} fp32 {'copies' if averages > 1 else 'copy'}", memory.averages),
        ("gradient buckets between processes, fp32", memory.buckets),
        (fixed, step.weight_copies),
        (f"activations of {plan.batch.micro_batch_size} images", step.kept),
        ("working memory of forward and backward", step.working),
        ("autoencoder, fp32", memory.encoder),
    ]
    step_bytes = step.weight_copies + step.kept + step.working
    if memory.encoding > step_bytes:
        items.append(("encoding, beyond what a step takes", memory.encoding - step_bytes))
    unit, size = ("GB", 1e9) if memory.total >= 1e9 else ("MB", 1e6)
    lines = [f"memory per GPU in {unit} (1 {unit} = {size:,.0f} bytes)"]
    items = [(name, count) for name, count in items if count >= 0.005 * size] + [
        ("sum", memory.total)
    ]
    lines += [f"  {name:<42}{count / size:>9.2f}" for name, count in items]
    room = f"{plan.device.memory_gb:g} GB less {MARGIN:.0%} for CUDA and fragmentation"
    switched, other = plan.memory_if_switched, not options.train.activation_checkpointing
    lines.append(
        f"with --activation-checkpointing {other}: activations "
        f"{switched.activations.kept / size:,.2f} {unit}, sum {switched.total / size:,.2f} {unit}, "
        f"{'4' if other else '3'} forward passes' FLOPs per step instead of {plan.passes}"
    )
    if plan.fits(memory):
        lines.append(f"fits: yes ({room})")
    else:
        help_ = (
            "--activation-checkpointing True, or raise"
            if other and plan.fits(switched)
            else "raise"
        )
        lines.append(f"fits: no ({room}); {help_} --accumulation or --gpus")
    return lines


def _time(options: PlanCommand, plan: Plan) -> list[str]:
    """Training time. Where no data are named they may be cached latents: those come first."""
    config, device, once = options.train, plan.device, plan.cache
    model = _pace(config.steps, plan.model_seconds)
    peak = (
        f"  model at {options.utilisation:.0%} of {getattr(device, config.precision):g} TFLOPS "
        f"{config.precision} per GPU"
    )
    if once is None:
        return [f"time: {model}", peak]
    mirrors = " and their mirrors" if once.mirrors == 2 else ""
    both = _pace(config.steps, plan.model_seconds + plan.encoding_seconds)
    ways = [
        [
            f"{model} on latents encoded once",
            f"  python -m sit_vit5 encode: {duration(once.seconds)} and "
            f"{size_text(once.bytes)} of disk for {once.images:,} images{mirrors}",
        ],
        [f"{both} encoding every image in every step"],
    ]
    if config.data.source is not None or config.data.path is not None:
        ways.reverse()
    (first, *more), (second, *rest) = ways
    encoder = f"  encoder at the same share of {device.fp32:g} TFLOPS fp32 per GPU, without TF32"
    return [f"time: {first}", *more, f"or: {second}", *rest, peak, encoder]


def _pace(steps: int, seconds: float) -> str:
    """Time for all steps and speed, of the seconds of one step."""
    return f"{duration(steps * seconds)} for {steps:,} steps ({1 / seconds:,.3g} steps per second)"


def _sampling(plan: Plan) -> list[str]:
    """Time to sample for the published protocol, in the two precisions of final numbers."""
    guided = plan.data.num_classes > 0
    times = []
    for precision in ("tf32", "fp32"):
        plain, twice = (
            duration(plan.sampling_seconds(precision, passes=passes)) for passes in (1, 2)
        )
        times.append(f"{plain}{f', guided {twice}' if guided else ''} in {precision}")
    return [f"sampling {SAMPLES:,} images by {CALLS} network calls each: {'; '.join(times)}"]


def duration(seconds: float) -> str:
    """Seconds in the largest unit that they fill."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def _assumptions(options: PlanCommand, plan: Plan) -> list[str]:
    config = options.train
    lines = [
        "nothing was run on such a device: peaks and memory are the vendor's, dense, and the "
        f"utilisation {options.utilisation:g} is a guess that depends on model, batch and driver",
        "activations are counted tensor by tensor on the model itself; "
        "what the allocator rounds up or keeps free is not in them",
        "the sum takes every item at its largest, though gradients grow as activations go",
        "only FLOPs take time: small models are slower, held up by launching their operations",
        "loading images, gradients between processes, checkpoints and previews take no time, nor "
        "does decoding samples",
    ]
    if config.data.source is None and config.data.path is None:
        lines.append(
            f"no data are named: {plan.data.count:,} RGB images as ImageNet has, "
            f"{plan.data.num_classes} classes (--classes)"
        )
    if config.compile is not False:  # None: they are on CUDA
        lines.append("blocks are not compiled: compiling keeps fewer activations")
    if plan.encoding.flops:
        lines.append("memory holds the autoencoder, which training on cached latents does not need")
    if plan.encoding.note:
        lines.append(plan.encoding.note)
    return lines
