"""The Ampere kernels compile for each chip that they are for, without a GPU: `make sm90a`."""

import importlib.util
import math
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from ampere_chips import CASES, B, N
from ampere_chips import T as LENGTH
from described_gpus import CHIPS

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for a GPU needs jax-cuda13-plugin: make sm90a",
)

# Bytes that ptxas 13.0 spills at most, on chips with tiles of 128 queries for heads of 128. Without
# the visits that clean values of NaN and Inf, which few calls make, "full" spills 12 on sm_80. The
# chips with 100 KiB of shared memory have tiles of 64 queries, and spill nothing there.
SPILLED = {"full": 1300, "causal": 200, "window": 2700}
SMALL = ("sm_86", "sm_89", "sm_120")
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
    """One kernel runs, for that chip, and beside it nothing needs memory but rows that pad lse."""
    text = ptxas_output[f"{chip} {name}"]
    ((kernel, target, spills),) = re.findall(
        r"entry function '(\w+?)_mosaic_gpu_kernel' for '(\w+)'.*?(\d+) bytes spill stores",
        text,
        flags=re.DOTALL,
    )
    assert kernel == "memeff_ampere_forward"
    assert target.rstrip("a") == chip
    is_small = chip in SMALL and CASES[name]["H"] > 64
    assert int(spills) <= (0 if is_small else SPILLED[name])
    (registers,) = map(int, re.findall(r"Used (\d+) registers", text))
    assert registers <= 255  # of each of 128 threads: two blocks of 65,536 registers
    (temporary,) = map(int, re.findall(r"temporary bytes (\d+)", text))
    T = CASES[name].get("T", LENGTH)
    assert temporary <= 4 * B * N * (T + 128) + 4096


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("H", [64, 128])
def test_two_blocks_fit_into_a_multiprocessor(chip, H):
    """One computes while the other waits for its copies."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from memeff.device import pretend_device
    from memeff.pallas.ampere import calls, forward

    with pretend_device("gpu", CHIPS[chip].capability):
        tiling = calls.tiling_for(H)
    scratch = forward.forward_scratch(tiling, H, H, jnp.bfloat16)
    arrays = [x for x in scratch if x is not None]
    needed = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    needed += REDUCTION_BYTES + 1024  # what the system takes
    assert 2 * needed <= CHIPS[chip].shared_kib * 1024
