"""Every option of every command. Imports no torch, so that --help is quick.

A docstring below a field is its text in `--help`. `None` means absent; 0 switches an interval off.
"""

from sit_vit5.config.calibration import CalibrateConfig as CalibrateConfig
from sit_vit5.config.data import EncodeConfig as EncodeConfig
from sit_vit5.config.data import InspectConfig as InspectConfig
from sit_vit5.config.evaluation import REFERENCE_COMMANDS as REFERENCE_COMMANDS
from sit_vit5.config.evaluation import AttentionConfig as AttentionConfig
from sit_vit5.config.evaluation import InspectReferenceConfig as InspectReferenceConfig
from sit_vit5.config.evaluation import LikelihoodConfig as LikelihoodConfig
from sit_vit5.config.evaluation import MakeReferenceConfig as MakeReferenceConfig
from sit_vit5.config.evaluation import MetricsConfig as MetricsConfig
from sit_vit5.config.evaluation import RealDataConfig as RealDataConfig
from sit_vit5.config.evaluation import RealImagesConfig as RealImagesConfig
from sit_vit5.config.evaluation import ReconstructionConfig as ReconstructionConfig
from sit_vit5.config.evaluation import ReportConfig as ReportConfig
from sit_vit5.config.evaluation import SweepConfig as SweepConfig
from sit_vit5.config.evaluation import check_attention as check_attention
from sit_vit5.config.evaluation import check_likelihood as check_likelihood
from sit_vit5.config.evaluation import check_sweep as check_sweep
from sit_vit5.config.evaluation import interval_of as interval_of
from sit_vit5.config.evaluation import likelihood_sampler as likelihood_sampler
from sit_vit5.config.interop import ConvertConfig as ConvertConfig
from sit_vit5.config.interop import ExportConfig as ExportConfig
from sit_vit5.config.interop import PosthocEmaConfig as PosthocEmaConfig
from sit_vit5.config.sampling import ADAPTIVE_METHODS as ADAPTIVE_METHODS
from sit_vit5.config.sampling import PICTURES as PICTURES
from sit_vit5.config.sampling import SDE_METHODS as SDE_METHODS
from sit_vit5.config.sampling import GenerateConfig as GenerateConfig
from sit_vit5.config.sampling import GridConfig as GridConfig
from sit_vit5.config.sampling import GuidanceConfig as GuidanceConfig
from sit_vit5.config.sampling import InterpolateConfig as InterpolateConfig
from sit_vit5.config.sampling import SamplerConfig as SamplerConfig
from sit_vit5.config.sampling import SdeConfig as SdeConfig
from sit_vit5.config.sampling import TrajectoryConfig as TrajectoryConfig
from sit_vit5.config.sampling import check_interval as check_interval
from sit_vit5.config.sampling import check_picture as check_picture
from sit_vit5.config.sampling import check_sampler as check_sampler
from sit_vit5.config.training import CheckpointConfig as CheckpointConfig
from sit_vit5.config.training import CodecConfig as CodecConfig
from sit_vit5.config.training import DataConfig as DataConfig
from sit_vit5.config.training import EmaConfig as EmaConfig
from sit_vit5.config.training import EvaluationConfig as EvaluationConfig
from sit_vit5.config.training import ObjectiveConfig as ObjectiveConfig
from sit_vit5.config.training import OptimizerConfig as OptimizerConfig
from sit_vit5.config.training import PreviewConfig as PreviewConfig
from sit_vit5.config.training import TrainConfig as TrainConfig
from sit_vit5.config.training import WatchdogConfig as WatchdogConfig
from sit_vit5.config.training import check_train as check_train
from sit_vit5.config.training import decay_name as decay_name
from sit_vit5.config.training import width_name as width_name
