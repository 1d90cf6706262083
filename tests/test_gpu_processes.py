"""A ring over GPUs, each of its own process, never deadlocks under delays, and its bits repeat."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_processes import free_port

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent
SECONDS = float(os.environ.get("MEMEFF_DELAY_SECONDS", 20))
TIME_TO_START = 120


def test_delays():
    """MEMEFF_DELAY_SECONDS says for how long steps are taken."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    script = str(TESTS / "delayed_processes.py")
    port, count = str(free_port()), jax.device_count()
    processes = []
    try:
        for number in range(count):
            command = [sys.executable, script, port, str(count), str(number), str(SECONDS)]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            processes.append(process)
        for process in processes:
            output, _ = process.communicate(timeout=SECONDS + TIME_TO_START)
            print(output)
            found = re.search(r"(\d+) steps, 0 with other bits", output)
            assert found and int(found[1]) > 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
