"""What the engine is told: the shapes of its two models, and what a request asks for."""

from ddtree.config.calibration import CALIBRATION_FILE, Calibration
from ddtree.config.sampling import SamplingParams
from ddtree.config.shapes import (
    DRAFT_ARCHITECTURES,
    TARGET_ARCHITECTURES,
    DraftConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    load_draft_config,
    load_target_config,
)

__all__ = [
    "CALIBRATION_FILE",
    "DRAFT_ARCHITECTURES",
    "TARGET_ARCHITECTURES",
    "Calibration",
    "DraftConfig",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "SamplingParams",
    "load_draft_config",
    "load_target_config",
]
