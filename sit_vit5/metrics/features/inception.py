"""torch-fidelity's InceptionV3, the port of the network that FID was defined with."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sit_vit5.metrics.features.base import LOGITS, POOL, SPATIAL, check_outputs, image_tensor
from sit_vit5.metrics.metric import default_device
from sit_vit5.utils.errors import UserError, brief
from sit_vit5.utils.files import file_hash
from sit_vit5.utils.precision import tf32_off
from sit_vit5.utils.tensors import read_tensors

# ADM's evaluator takes channels 0..6 of 192: 7 x 17 x 17 = 2,023 numbers, about as many as pool's.
SPATIAL_CHANNELS = 7
# Images at a time on a CPU: their activations stay in its caches.
CPU_BATCH = 8
_REMEDY = "download torch-fidelity's Inception weights file again"


class Inception:
    """pool (2,048), logits without bias (1,008) and ADM's spatial features (2,023), fp32.

    It resizes as TensorFlow did. ADM's `mixed_6/conv:0` is the rectified output of the 1x1 branch
    of the block that the port calls Mixed_6d: 17x17, flattened with the channels last.
    """

    outputs = (POOL, SPATIAL, LOGITS)

    def __init__(self, weights: str | None = None, *, option: str = "--weights"):
        path = find_inception_weights(weights, option=option)
        # Imported here: torch-fidelity takes seconds, and pixels need none of it.
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        # The library unpickles its file without restriction: it gets checked tensors instead.
        checked = io.BytesIO()
        torch.save(read_tensors(path, remedy=_REMEDY), checked)
        checked.seek(0)
        try:
            network = FeatureExtractorInceptionV3(
                "inception-v3-compat",
                ["2048", "logits_unbiased"],
                feature_extractor_weights_path=checked,
            )
        except Exception as error:  # load_state_dict raises many types
            raise UserError(
                f"{path} is not torch-fidelity's Inception weights file: {brief(error)}"
            ) from None
        self.device = default_device()
        # oneDNN's convolutions are 1.5 to 2 times as fast with channels last; cuDNN's fp32 are not.
        layout = torch.channels_last if self.device.type == "cpu" else torch.contiguous_format
        self.network = network.to(self.device, memory_format=layout).eval()
        self.identity = {"features": "inception", "weights_sha256": file_hash(path)}

    @torch.inference_mode()
    def __call__(
        self, images: np.ndarray, outputs: Sequence[str] = (POOL,)
    ) -> dict[str, np.ndarray]:
        check_outputs(outputs, self.outputs, "inception")
        size = CPU_BATCH if self.device.type == "cpu" else len(images)
        with tf32_off():
            parts = [
                self._batch(images[start : start + size]) for start in range(0, len(images), size)
            ]
        return {
            output: torch.cat([part[output] for part in parts]).cpu().numpy() for output in outputs
        }

    def _batch(self, images: np.ndarray) -> dict[str, torch.Tensor]:
        found = {}

        def record(branch: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            # A copy, before anything can work on the output in place.
            first = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1)  # (B, 17, 17, 7)
            found[SPATIAL] = first.flatten(1).clone()

        hook = self.network.Mixed_6d.branch1x1.register_forward_hook(record)
        try:
            found[POOL], found[LOGITS] = self.network(image_tensor(images, self.device))
        finally:
            hook.remove()
        return found


def find_inception_weights(path: str | None, *, option: str = "--weights") -> Path:
    """The given file, or torch-fidelity's in torch's cache; never a download by surprise.

    option: the command's option for the file.
    """
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    name = URL_INCEPTION_V3.rsplit("/", 1)[1]
    found = Path(path) if path else Path(torch.hub.get_dir()) / "checkpoints" / name
    if not found.is_file():
        raise UserError(
            f"Inception weights {found} do not exist; download {URL_INCEPTION_V3} to that place, "
            f"or give the file with {option} FILE; for small images use the features pixels"
        )
    return found
