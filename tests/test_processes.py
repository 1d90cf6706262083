"""A ring over the devices of two processes gives the numbers of one device, and never deadlocks."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
SECONDS = 300  # both processes end within this time, or something waits forever


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(logs: list[Path], devices: int, seconds: float) -> None:
    """Run tests/processes.py once for each of `logs`, and check that all end well.

    Each process has `devices`, and waits up to `seconds` before each step.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    port = free_port()
    processes = []
    try:
        for number, log in enumerate(logs):
            arguments = [str(x) for x in (port, len(logs), number, seconds)]
            command = [sys.executable, str(TESTS / "processes.py"), *arguments]
            with log.open("w") as file:
                process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
            processes.append(process)
        wait_for(processes)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [
        f"process {n} returned {code}:\n{log.read_text()}"
        for n, (code, log) in enumerate(zip(codes, logs, strict=True))
    ]
    assert codes == [0] * len(logs), "\n".join(texts)
    for text in texts:
        assert "all right" in text, text


def wait_for(processes: list[subprocess.Popen]) -> None:
    """Wait until all processes have ended, one has failed, or the time is over."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(0.1)


@pytest.mark.parametrize(
    "devices, seconds", [pytest.param(4, 0, id="four each"), pytest.param(2, 1, id="with delays")]
)
def test_two_processes(tmp_path, devices, seconds):
    logs = [tmp_path / f"process {number}.txt" for number in range(2)]
    run_processes(logs, devices, seconds)
