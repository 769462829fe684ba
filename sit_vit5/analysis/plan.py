"""Estimate of a training run: memory, time and disk, counted on fake tensors and FLOPs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sit_vit5.analysis.cost import count_flops, denoiser_cost
from sit_vit5.codecs import configured_codec
from sit_vit5.codecs.autoencoder import AT_ONCE, AUTOENCODERS, KINDS, build, find
from sit_vit5.config import CodecConfig, TrainConfig
from sit_vit5.config.plan import Device, PlanCommand
from sit_vit5.data import build_source
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import set_attention
from sit_vit5.training.disk import FP32, MOMENTS, RunDisk, run_disk
from sit_vit5.training.run import check_image_size
from sit_vit5.utils.distributed import BatchPlan
from sit_vit5.utils.precision import autocast


class LiveMemory(TorchDispatchMode):
    """Bytes of what operations made and what still lives: now, and at most so far.

    known: tensors that were there before and are not counted.
    """

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch beyond weights, gradients and optimizer state.

    weight_copies: what does not grow with the batch, the bf16 weights under autocast; kept: what
    the forward pass keeps for the backward pass; working: what the step needs on top at its peak.
    """

    weight_copies: int
    kept: int
    working: int


def activations(
    build: Callable[[], Denoiser],
    latent_shape: tuple[int, int, int],
    *,
    micro_batch_size: int,
    precision: str,
) -> Activations:
    """Bytes of a training step of the denoiser that `build` makes."""
    with FakeTensorMode():
        model = build()
        once = _step(model, latent_shape, micro_batch_size, precision)
        twice = _step(model, latent_shape, 2 * micro_batch_size, precision)
    copies = 2 * once.now - twice.now
    return Activations(copies, once.now - copies, once.peak - once.now)


@dataclass(frozen=True)
class _Measured:
    now: int
    peak: int


def _step(
    model: Denoiser, latent_shape: tuple[int, int, int], batch: int, precision: str
) -> _Measured:
    """Live bytes after forward, and at the peak of forward and backward."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with LiveMemory([*model.parameters(), *gradients]) as memory:
        x_t, t = torch.empty(batch, *latent_shape), torch.empty(batch)
        labels = torch.zeros(batch, dtype=torch.long)
        with autocast(x_t.device, precision):
            prediction = model(x_t, t, labels)
        loss = prediction.square().mean()
        kept = memory.now
        del prediction
        loss.backward()
    return _Measured(kept, memory.peak)


def call_peak(module: nn.Module, call: Callable[[], object]) -> int:
    """Largest number of live bytes during a call without gradients; inside a FakeTensorMode."""
    with LiveMemory([*module.parameters(), *module.buffers()]) as memory, torch.no_grad():
        call()
    return memory.peak


# config.json of stabilityai/sd-vae-ft-ema and sd-vae-ft-mse.
STABLE_DIFFUSION = {
    "_class_name": "AutoencoderKL",
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
}
# What is counted where no folder is given; TAESD has diffusers' default values.
PUBLISHED = {
    "sd-vae-ema": STABLE_DIFFUSION,
    "sd-vae-mse": STABLE_DIFFUSION,
    "taesd": {"_class_name": "AutoencoderTiny"},
}


@dataclass(frozen=True)
class Encoding:
    """flops: of one image, in fp32; weights, working: bytes; note: what is not counted, or None.

    moments: numbers that a latent cache holds of one image.
    """

    factor: int
    latent_shape: tuple[int, int, int]
    flops: int = 0
    moments: int = 0
    weights: int = 0
    working: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Cache:
    """Encoding everything once. mirrors: of every image; seconds: on all GPUs together."""

    images: int
    mirrors: int
    bytes: int
    seconds: float


def cache(encoded: Encoding, images: int, *, mirrors: int, flops_per_second: float) -> Cache:
    """What `python -m sit_vit5 encode` would write and take, in its default float32."""
    visits = images * mirrors
    seconds = visits * encoded.flops / flops_per_second
    return Cache(images, mirrors, visits * encoded.moments * FP32, seconds)


def encoding(
    codec: CodecConfig, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    """Cost of encoding images (C, H, W). Needs no weights, nor the hub for what is published."""
    if codec.name in AUTOENCODERS:
        return _autoencoder(_config(codec), image_shape, micro_batch_size)
    built = configured_codec(codec)
    note = None if codec.name == "identity" else f"the codec {codec.name} is not counted"
    return Encoding(built.factor, built.latent_shape(image_shape), note=note)


def _config(codec: CodecConfig) -> dict:
    """config.json of the autoencoder in a local folder, else the published one."""
    if codec.name in PUBLISHED and not (codec.path is not None and Path(codec.path).is_dir()):
        return PUBLISHED[codec.name]
    return find(codec.name, codec.path, local_only=False).config


def _autoencoder(
    config: dict, image_shape: tuple[int, int, int], micro_batch_size: int
) -> Encoding:
    kind = KINDS[config["_class_name"]]
    with torch.device("meta"):
        vae = build(config)
        flops = count_flops(lambda: vae.encode(torch.empty(1, *image_shape))).get_total_flops()
    factor = kind.factor(vae.config)
    with FakeTensorMode():
        vae = build(config)
        images = torch.empty(min(micro_batch_size, AT_ONCE), *image_shape)
        working = call_peak(vae, lambda: kind.moments(vae.encode(images)))
    size = image_shape[1] // factor, image_shape[2] // factor
    channels = vae.config.latent_channels
    return Encoding(
        factor,
        (channels, *size),
        flops=flops,
        moments=channels * (2 if kind.draws_noise else 1) * math.prod(size),
        weights=sum(4 * p.numel() for p in vae.parameters()),
        working=working,
    )


IMAGENET_IMAGES = 1_281_167  # of ILSVRC 2012's training set
# The published protocol: samples, and calls of the network for each.
SAMPLES, CALLS = 50_000, 250
# Left free: CUDA's own memory (about 0.5 GB), fragmentation, workspaces of the libraries.
MARGIN = 0.1


@dataclass(frozen=True)
class Data:
    """What the training data tell: kind, shape and count of items, number of classes (0: none)."""

    kind: str
    item_shape: tuple[int, int, int]
    count: int
    num_classes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    moments: int
    averages: int
    buckets: int
    activations: Activations
    encoder: int
    encoding: int

    @property
    def total(self) -> int:
        """Encoding is over before the forward pass: only the larger of the two counts."""
        step = self.activations
        step_bytes = step.weight_copies + step.kept + step.working
        state = self.weights + self.gradients + self.moments + self.averages + self.buckets
        return state + self.encoder + max(step_bytes, self.encoding)


@dataclass(frozen=True)
class Plan:
    """An estimate. flops: of one image's forward pass; seconds: of one step.

    passes: forward passes that a step's FLOPs are worth; memory_if_switched: with the other value
    of `activation_checkpointing`. cache: None where nothing is encoded. rate: FLOPs per second of
    all GPUs for each TFLOPS of one GPU's peak.
    """

    batch: BatchPlan
    data: Data
    encoding: Encoding
    parameters: int
    trainable: int
    flops: int
    passes: int
    memory: Memory
    memory_if_switched: Memory
    device: Device
    model_seconds: float
    encoding_seconds: float
    cache: Cache | None
    disk: RunDisk
    rate: float

    def sampling_seconds(self, precision: str, *, passes: int) -> float:
        """Time to sample for the published protocol. passes: 2 with guidance, else 1."""
        return SAMPLES * CALLS * passes * self.flops / (self.rate * getattr(self.device, precision))

    @property
    def step_flops(self) -> int:
        """Forward and backward of a whole batch; backward costs two forwards."""
        return self.passes * self.flops * self.batch.batch_size

    def fits(self, memory: Memory) -> bool:
        """Whether the device has room for it, with the margin."""
        return memory.total <= (1 - MARGIN) * self.device.memory_gb * 1e9


def make_plan(options: PlanCommand) -> Plan:
    """The estimate for a training configuration on some GPUs."""
    config, device = options.train, options.peaks()
    batch = BatchPlan(config.batch_size, config.accumulation, options.gpus)
    data = describe_data(config, options.classes)
    encoded = describe_encoding(config, data, batch.micro_batch_size)
    network = _network(config, encoded.latent_shape, data.num_classes)
    parameters = sum(p.numel() for p in network.parameters())
    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    flops = _forward_flops(config, encoded.latent_shape, data.num_classes)
    memory, switched = (
        estimate_memory(option, batch, encoded, data, parameters, trainable)
        for option in (
            config,
            replace(config, activation_checkpointing=not config.activation_checkpointing),
        )
    )
    passes = 4 if config.activation_checkpointing else 3
    rate = options.gpus * options.utilisation * 1e12  # FLOPs per second and TFLOPS of peak
    return Plan(
        batch=batch,
        data=data,
        encoding=encoded,
        parameters=parameters,
        trainable=trainable,
        flops=flops,
        passes=passes,
        memory=memory,
        memory_if_switched=switched,
        device=device,
        model_seconds=passes
        * flops
        * batch.batch_size
        / (rate * getattr(device, config.precision)),
        encoding_seconds=encoded.flops * batch.batch_size / (rate * device.fp32),
        cache=cache(
            encoded,
            data.count,
            mirrors=2 if config.data.horizontal_flip else 1,
            flops_per_second=rate * device.fp32,
        )
        if encoded.flops
        else None,
        disk=run_disk(config, parameters, trainable),
        rate=rate,
    )


def describe_data(config: TrainConfig, classes: int) -> Data:
    """What the named data tell; else ImageNet's number of RGB images of `classes`."""
    if config.data.source is None and config.data.path is None:
        side = config.data.image_size
        classes = 0 if config.data.unconditional else classes
        return Data("images", (3, side, side), IMAGENET_IMAGES, classes)
    source = build_source(config.data)
    return Data(source.kind, source.item_shape, len(source), len(source.class_names))


def describe_encoding(config: TrainConfig, data: Data, micro_batch_size: int) -> Encoding:
    """What the codec adds; nothing where the data are latents already."""
    if data.kind == "moments":
        return Encoding(1, data.item_shape)
    encoded = encoding(config.codec, data.item_shape, micro_batch_size)
    check_image_size(config.data.image_size, encoded.factor, config.backbone.patch_size)
    return encoded


def estimate_memory(
    config: TrainConfig,
    batch: BatchPlan,
    encoded: Encoding,
    data: Data,
    parameters: int,
    trainable: int,
) -> Memory:
    """Bytes on one GPU, item by item."""
    cut = config.parallel == "fsdp2"
    parts = batch.processes if cut else 1
    if cut:  # the weights of the block at work and of the next one are gathered
        buckets = 2 * FP32 * parameters // config.backbone.depth
    else:  # DistributedDataParallel sends gradients from buckets of its own
        buckets = FP32 * trainable
    averages = 0 if config.ema.device == "host" else len(config.ema.names)
    return Memory(
        weights=FP32 * parameters // parts,
        gradients=FP32 * trainable // parts,
        moments=MOMENTS * trainable // parts,
        averages=FP32 * parameters * averages // parts,
        buckets=buckets if batch.processes > 1 else 0,
        activations=activations(
            lambda: _build(config, encoded.latent_shape, data.num_classes),
            encoded.latent_shape,
            micro_batch_size=batch.micro_batch_size,
            precision=config.precision,
        ),
        encoder=encoded.weights,
        encoding=encoded.working,
    )


def _forward_flops(
    config: TrainConfig, latent_shape: tuple[int, int, int], num_classes: int
) -> int:
    cost = denoiser_cost(
        config.backbone,
        in_channels=latent_shape[0],
        input_size=latent_shape[1:],
        num_classes=num_classes,
    )
    return cost.flops


def _network(config: TrainConfig, latent_shape: tuple[int, int, int], num_classes: int) -> Denoiser:
    with torch.device("meta"):
        return _build(config, latent_shape, num_classes)


def _build(config: TrainConfig, latent_shape: tuple[int, int, int], num_classes: int) -> Denoiser:
    model = Denoiser(
        config.backbone,
        in_channels=latent_shape[0],
        input_size=latent_shape[1:],
        num_classes=num_classes,
    )
    set_attention(model, config.attention)
    model.activation_checkpointing = config.activation_checkpointing
    return model
