"""The TPU kernels compile for chips that are not here: `make tpu`."""

import importlib.util

import pytest
from described_tpus import CHIPS
from scripts import output_of
from tpu import CASES

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs libtpu: make tpu"
)
BYTES_OF_128K = 800 * 10**6  # temporary; T x S logits of one head alone would be 68 GB


def reports(chip: str, *names: str) -> list[list[str]]:
    """Compile cases for a chip, and return the fields of what was printed of each program."""
    lines = output_of("tpu.py", chip, *names).splitlines()
    return [line.split("|") for line in lines if line.count("|") == 5]


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    """Forward and gradient run kernels; a plan is right within a factor of two for long calls."""
    names = CASES if chip == "v5e" else ("causal", "documents", "float32")
    found = reports(chip, *names)
    assert len(found) == 2 * len(names)
    for name, what, kernels, temporary, planned, _ in found:
        # the forward has one more, which runs where a value is not finite
        assert int(kernels) == (2 if what == "forward" else 4), (name, what)
        assert int(temporary) < 2 * int(planned), (name, what)
        if name == "causal" and chip == "v5e":
            assert int(temporary) > int(planned) / 2, what
        if name == "128k":
            assert int(temporary) < BYTES_OF_128K
