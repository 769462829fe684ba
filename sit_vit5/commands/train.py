"""Trains a flow-matching model: `python train_sit.py --config configs/digits.yaml`."""

from sit_vit5.config.parse import parse_train


def main(argv: list[str]) -> int:
    """Parse, build, run. The heavy imports wait until the options are known to be good."""
    config, checkpoint = parse_train(argv)

    from sit_vit5.data import build_source
    from sit_vit5.models.checkpoint import open_checkpoint
    from sit_vit5.sampling.grid import GridPreview, preview_codec
    from sit_vit5.training.run import open_codec
    from sit_vit5.training.trainer import Trainer
    from sit_vit5.utils.distributed import join_processes

    source = build_source(config.data)
    codec = open_codec(config.codec, source)
    decoder = preview_codec(config, codec)
    evaluation = None
    if config.evaluation.every:
        from sit_vit5.evaluation.online import OnlineEvaluation

        processes = join_processes(minutes=config.watchdog.patience)
        evaluation = OnlineEvaluation(config, source, codec, processes)
    trainer = Trainer(
        config,
        source,
        codec,
        preview=decoder and GridPreview(config, decoder, source.class_names),
        evaluation=evaluation,
        resume=open_checkpoint(checkpoint) if checkpoint else None,
    )
    return trainer.run()
