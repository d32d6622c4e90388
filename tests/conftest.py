"""What every test may rely on: import paths, one thread, no network, the demo pair."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
for folder in ("tests", "examples"):
    sys.path.insert(0, str(ROOT / folder))

# For subprocesses too, and read by libraries that the tests import later.
os.environ.update(
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "ddtree", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ddtree")


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """Checkpoint folder of the demo's chat model, converted once and cached."""
    from get_demo_model import demo_target

    return demo_target(progress=False)


@pytest.fixture(scope="session")
def demo_drafter() -> Path:
    """Checkpoint folder of the demo's drafter."""
    return ROOT / "examples" / "assets" / "smollm2-135m-dflash"
