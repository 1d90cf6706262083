"""Random calls of a sequence over CPU devices. `python tests/sequence_fuzz.py` runs any number."""

import pytest
import sequence_fuzz
from conftest import few


@pytest.mark.parametrize("seed", few(range(24), (1,)))
@pytest.mark.parametrize("devices", [2, 3])
def test_random_calls(seed, devices):
    sequence_fuzz.judge(sequence_fuzz.draw(seed), devices)
