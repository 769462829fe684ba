"""The numbers of a plan. `sit_vit5.plan.report` puts them into words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sit_vit5.config import TrainConfig
from sit_vit5.data import build_source
from sit_vit5.disk import FP32, MOMENTS, RunDisk, run_disk
from sit_vit5.distributed import BatchPlan
from sit_vit5.models.cost import denoiser_cost
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.models.layers import set_attention
from sit_vit5.plan.devices import Device
from sit_vit5.plan.encoding import Cache, Encoding, cache, encoding
from sit_vit5.plan.memory import Activations, activations
from sit_vit5.plan.options import PlanCommand
from sit_vit5.training.run import check_image_size

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
    of `recompute`. cache: None where nothing is encoded. rate: FLOPs per second of all GPUs for
    each TFLOPS of one GPU's peak.
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
        for option in (config, replace(config, recompute=not config.recompute))
    )
    passes = 4 if config.recompute else 3
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
    model.recompute = config.recompute
    return model
