"""The Ampere kernels compile for each chip that they are for, without a GPU: `make sm90a`."""

import importlib.util
import math
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from ampere_chips import CASES, B, N
from ampere_chips import T as LENGTH
from described_gpus import CHIPS, KIB

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for a GPU needs jax-cuda13-plugin: make sm90a",
)

# Bytes that ptxas 13.0 spills at most. Tiles of 128 queries and heads of 128 take all registers of
# the forward; most of it is in visits that clean values of NaN and Inf, which few calls make. Masks
# and a soft cap take registers of the gradient, too: dk and dv spill 2,044 on sm_100. So do tiles
# of 128 queries for dq, with heads of 64, which are faster all the same (docs/kernels-log.md).
SPILLED = {"memeff_ampere_forward": 3300, "memeff_ampere_dq": 340, "memeff_ampere_dkdv": 900}
SPILLED_IN_WINDOW = {"memeff_ampere_dkdv": 2100}
REDUCTION_BYTES = 2048  # that `kernel` reserves


@pytest.fixture(scope="module")
def ptxas_output():
    """Compile every case for every chip, and return what was printed of each."""
    script = pathlib.Path(__file__).with_name("ampere_chips.py")
    texts = {}
    for chip in CHIPS:
        run = subprocess.run(
            [sys.executable, script, chip],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        assert run.returncode == 0, run.stdout[-2000:]
        _, *parts = re.split(r"^case (.*)\n", run.stdout, flags=re.MULTILINE)
        texts |= zip(parts[::2], parts[1::2], strict=True)
    return texts


@needs_plugin
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(ptxas_output, chip, name):
    """Three kernels run, for that chip. Beside them, memory is needed for lse and delta alone."""
    text = ptxas_output[f"{chip} {name}"]
    found = re.findall(
        r"entry function '(\w+?)_mosaic_gpu_kernel' for '(\w+)'.*?(\d+) bytes spill stores",
        text,
        flags=re.DOTALL,
    )
    assert {kernel for kernel, _, _ in found} == SPILLED.keys()
    for kernel, target, spills in found:
        assert target.rstrip("a") == chip
        allowed = SPILLED | (SPILLED_IN_WINDOW if name == "window" else {})
        assert int(spills) <= allowed[kernel], kernel
    # A thread block has 128 threads, so two have all 65,536 registers.
    assert max(map(int, re.findall(r"Used (\d+) registers", text))) <= 255
    (temporary,) = map(int, re.findall(r"temporary bytes (\d+)", text))
    T = CASES[name].get("T", LENGTH)
    ids = 2 * 4 * B * T if "mask_fn" in CASES[name] else 0  # of queries, and of keys
    assert temporary <= 3 * 4 * B * N * (T + 128) + ids + 8192


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("H", [64, 128])
def test_blocks_fit_into_a_multiprocessor(chip, H):
    """Two fit, so that one computes while the other waits for its copies.

    Where a multiprocessor has 100 KiB, one fits for heads of 128.
    """
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from memeff.device import pretend_device
    from memeff.pallas.ampere import backward, calls, forward

    with pretend_device("gpu", CHIPS[chip].capability):
        tiling = calls.tiling_for(H)
        stages, query_rows = calls.gradient_tiling(H)
    blocks = 1 if H == 128 and CHIPS[chip].shared_kib == 100 else 2
    for scratch in (
        forward.forward_scratch(tiling, H, H, jnp.bfloat16),
        backward.scratch_types(H, H, jnp.bfloat16, stages, query_rows),
        backward.scratch_types(H, H, jnp.bfloat16, stages, backward.ROWS),
    ):
        needed = shared_bytes(scratch)
        assert needed <= CHIPS[chip].largest_block
        assert blocks * needed <= CHIPS[chip].shared_kib * KIB


def shared_bytes(scratch) -> int:
    """Return the bytes of a thread block's shared memory, with what the system takes."""
    arrays = jax.tree.leaves(scratch)
    needed = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return needed + REDUCTION_BYTES + KIB
