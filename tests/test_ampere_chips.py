"""The Ampere kernels compile for each chip that they are for, without a GPU: `make sm90a`."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from ampere_chips import CASES, B, N
from ampere_chips import T as LENGTH
from described_gpus import CHIPS, KIB
from scripts import output_of_cases

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
SPILLED_WITH_BIAS = {"memeff_ampere_dq": 380, "memeff_ampere_dbias": 100}  # dq on sm_100, else 340
SPILLED_WITH_ARRAYS = {"memeff_ampere_dq": 820, "memeff_ampere_dkdv": 1230}  # 128, on sm_100
SPILLED_BY_FUSED = {"memeff_ampere_fused": 100}
PARTS = 4  # of the 16 query heads of the only key head, at most
REDUCTION_BYTES = 2048  # that `kernel` reserves


FAST = {"causal", "bias, tails"}  # the other cases are slow
NAMES = [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in CASES]


@pytest.fixture(scope="module")
def ptxas_output(request):
    """Compile the cases of all selected tests, and return what was printed of each."""
    names = {chip: [] for chip in CHIPS}
    for test in request.session.items:
        if "ptxas_output" in test.fixturenames and test.path.samefile(__file__):
            names[test.callspec.params["chip"]].append(test.callspec.params["name"])
    texts = {}
    for chip in filter(names.get, CHIPS):
        texts |= output_of_cases("ampere_chips.py", chip, *names[chip])
    return texts


@needs_plugin
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(ptxas_output, chip, name):
    """The kernels run, for that chip. Beside them, memory is needed for lse and delta alone."""
    text = ptxas_output[f"{chip} {name}"]
    found = re.findall(
        r"entry function '(\w+?)_mosaic_gpu_kernel' for '(\w+)'.*?(\d+) bytes spill stores",
        text,
        flags=re.DOTALL,
    )
    has_bias = "bias" in CASES[name]
    is_fused = "backward" in CASES[name]
    expected = SPILLED | (SPILLED_WITH_BIAS if has_bias else {})
    expected |= SPILLED_BY_FUSED if is_fused else {}
    assert {kernel for kernel, _, _ in found} == expected.keys()
    for kernel, target, spills in found:
        assert target.rstrip("a") == chip
        allowed = expected | (SPILLED_IN_WINDOW if name == "window" else {})
        allowed |= SPILLED_WITH_ARRAYS if "numbers" in CASES[name] else {}
        assert int(spills) <= allowed[kernel], kernel
    # A thread block has 128 threads, so two have all 65,536 registers.
    assert max(map(int, re.findall(r"Used (\d+) registers", text))) <= 255
    (temporary,) = map(int, re.findall(r"temporary bytes (\d+)", text))
    T = CASES[name].get("T", LENGTH)
    ids = 2 * 4 * B * T if "mask_fn" in CASES[name] else 0  # of queries, and of keys
    # A bias whose rows are no whole tiles is copied, and so is its gradient.
    copies = 2 * 2 * N * T * (T + 64) if has_bias and T % 64 else 0
    vectors = 3 + len(CASES[name].get("numbers", ()))
    sums = 4 * B * N * (T + 64) * CASES[name]["H"] if is_fused else 0
    if CASES[name].get("K") == 1:  # dk and dv of parts of the group, each in two arrays
        sums += PARTS * 2 * 4 * B * T * CASES[name]["H"]
    assert temporary <= vectors * 4 * B * N * (T + 128) + ids + copies + sums + 8192


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("bias", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("H", [64, 128])
def test_blocks_fit_into_a_multiprocessor(chip, bias, H):
    """Two fit, so that one computes while the other waits for its copies.

    One fits for heads of 128 where a multiprocessor has 100 KiB, and where 164 with a bias in
    float32; and with such a bias for heads of 64 where it has 100.
    """
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from memeff.device import pretend_device
    from memeff.pallas.ampere import backward, backward_bias, calls, forward
    from memeff.pallas.hopper.scalars import Scalars

    numbers = None if bias is None else jax.ShapeDtypeStruct((1, 1, 64, 64), bias)
    scalars = Scalars(bias=numbers)
    itemsize = 0 if bias is None else jnp.dtype(bias).itemsize

    with pretend_device("gpu", CHIPS[chip].capability):
        tiling = calls.tiling_for(H, itemsize)
        stages, query_rows = calls.gradient_tiling(H, itemsize)
        bias_stages = calls.bias_gradient_stages(H, itemsize)
    one_fits = {(128, None): [100], (128, "bfloat16"): [100]}
    one_fits |= {(64, "float32"): [100], (128, "float32"): [100, 164]}
    blocks = 1 if CHIPS[chip].shared_kib in one_fits.get((H, bias), []) else 2
    dtype = jnp.bfloat16
    kernels = [
        forward.forward_scratch(tiling, H, H, dtype, scalars),
        backward.scratch_types(H, H, dtype, stages, (query_rows, backward.ROWS), scalars),
        backward.scratch_types(H, H, dtype, stages, (backward.ROWS, backward.ROWS), scalars),
    ]
    if bias is None:
        kernels.append(
            backward.scratch_types(
                *(H, H, dtype, stages, (backward.ROWS, backward.ROWS), scalars), has_sums=True
            )
        )
    else:
        kernels.append(backward_bias.scratch_types(H, H, dtype, bias_stages, scalars))
    for scratch in kernels:
        needed = shared_bytes(scratch)
        assert needed <= CHIPS[chip].largest_block
        assert blocks * needed <= CHIPS[chip].shared_kib * KIB


def shared_bytes(scratch) -> int:
    """Return the bytes of a thread block's shared memory, with what the system takes."""
    arrays = jax.tree.leaves(scratch)
    needed = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return needed + REDUCTION_BYTES + KIB
