"""The tree, sampling and elementwise kernels compile for every chip: no stack, no spills."""

import pytest
from kernel_tools import CHIPS
from token_kernel_variants import REST, SMALL, compile_variant


@pytest.mark.parametrize("variant", SMALL, ids=str)
def test_compile_for_sm_90(variant):
    compile_variant(variant, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*SMALL, *REST], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_compile_every_variant(chip, variant):
    compile_variant(variant, chip)
