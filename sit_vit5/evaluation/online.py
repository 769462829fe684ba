"""Online evaluation: metrics of samples during training, for `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sit_vit5.codecs import Codec, configured_codec
from sit_vit5.codecs.cached import RecordedCodec
from sit_vit5.config import MetricsConfig, TrainConfig
from sit_vit5.data import Source
from sit_vit5.evaluation.compare import open_reference
from sit_vit5.evaluation.report import metric_name
from sit_vit5.flow.predictions import Flow
from sit_vit5.metrics.accumulator import Accumulator, State
from sit_vit5.metrics.image_sets import UnmadeSet
from sit_vit5.models.denoiser import Denoiser
from sit_vit5.sampling.field import Guidance, guidance_scale_or_default
from sit_vit5.sampling.generator import Generator, Settings, choose_labels
from sit_vit5.utils.distributed import Processes
from sit_vit5.utils.errors import UserError
from sit_vit5.utils.progress import progress_bar


class OnlineEvaluation:
    """Metrics of a network's samples against a reference, opened once before the first step.

    Image i has the same noise and label at every evaluation, on any process; so values of
    different steps differ by the weights, not by chance.
    """

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        codec: Codec | RecordedCodec,
        processes: Processes,
    ):
        self.options, self.seed = config.evaluation, config.seed
        self.classes = range(len(source.class_names))
        self.codec = decoder(config, codec)
        objective, options = config.objective, config.evaluation
        self.flow = Flow(objective.interpolant, objective.prediction)
        self.settings = Settings(
            method=options.method,
            steps=options.steps,
            shift=objective.shift,
            guidance=Guidance(
                guidance_scale_or_default(
                    options.guidance_scale,
                    class_names=source.class_names,
                    class_dropout=objective.class_dropout,
                )
            ),
            precision=config.precision,
            attention=config.attention,
            seed=config.seed,
        )
        latent_shape = source.item_shape
        if source.kind == "images":
            latent_shape = self.codec.latent_shape(latent_shape)
        shape = self.codec.image_shape(latent_shape)
        self.reference = open_reference(
            MetricsConfig(
                "this run's samples",
                options.reference,
                metrics=options.metrics,
                features=options.features,
                weights=options.feature_weights,
            ),
            UnmadeSet("this run's samples", shape),
            processes,
            weights_option="--evaluation.feature-weights",
        )

    def share(self, network: Denoiser, processes: Processes, stopped: Callable[[], bool]) -> State:
        """Features of this process's batches of samples."""
        options, found = self.options, self._accumulator()
        generator = Generator(network, self.codec, self.flow, self.settings)
        starts = range(0, options.num_samples, options.batch_size)
        bar = progress_bar(
            options.num_samples, unit="image", title="evaluation", shown=processes.is_main
        )
        with bar:
            for start in starts[processes.rank :: processes.count]:
                if stopped():
                    break
                # The last batch is full size: a sample does not depend on the process.
                batch = range(start, start + options.batch_size)
                labels = choose_labels(batch, classes=self.classes, mode="random", seed=self.seed)
                wanted = range(start, min(batch.stop, options.num_samples))
                found.update(generator(batch, labels).pixels[: len(wanted)], wanted)
                bar.update(min(len(wanted) * processes.count, bar.total - bar.n))
        return found.state()

    def values(self, shares: list[State]) -> dict[str, float]:
        """Metrics of all samples under the names of the evaluator's table."""
        whole = self._accumulator()
        for share in shares:
            whole.merge(share)
        found = whole.compute()
        return {
            metric_name(self.options.features, self.options.num_samples, key): found[key]
            for metric in self.reference.metrics.values()
            for key in metric.names
            if found[key] is not None
        }

    def _accumulator(self) -> Accumulator:
        return Accumulator(
            self.reference.extractor, tuple(self.reference.metrics), self.reference.described
        )


def decoder(config: TrainConfig, codec: Codec | RecordedCodec) -> Codec:
    """The codec that makes pixels: of a latent cache its own, not a tiny one, whose images score
    otherwise."""
    if not isinstance(codec, RecordedCodec):
        return codec
    own = configured_codec(replace(config.codec, name=codec.name))
    if own.identity != codec.identity:
        raise UserError(
            f"evaluation needs the codec of the latent cache, {codec.identity}, found "
            f"{own.identity}; give it with --codec.path"
        )
    return own
