"""Test the bench's table of memory, and the peaks that it measures on a device."""

import sys

import jax
import pytest
from test_bench import read_rows, run

import memeff.bench.__main__ as command_line
from memeff import bench
from memeff.bench import calls, memory, speed
from memeff.bench.cases import input_arrays

pytestmark = pytest.mark.once

# ---- the table of memory


def test_memory_prints_a_table_in_which_memeff_is_linear_and_plain_attention_quadratic(
    capsys, tmp_path
):
    out = tmp_path / "rows.jsonl"
    plot = tmp_path / "memory.svg"
    arguments = ["--length", "4k", "8k", "--mode", "gradient"]
    text = run(capsys, "memory", *arguments, "--json", str(out), "--plot", str(plot))
    header, _, *table = text.splitlines()[3:]
    assert "causal forward + gradient: jax.nn" in header
    assert [line.split()[1] for line in table] == ["4k", "8k"]
    assert b"<svg" in plot.read_bytes()
    rows = read_rows(out)
    sizes = {(row["implementation"], row["length"]): row["temp_bytes"] for row in rows}
    assert sizes["memeff", 8192] / sizes["memeff", 4096] <= 2.15
    assert 3.9 < sizes["jax.nn", 8192] / sizes["jax.nn", 4096] < 4.1
    times_less = float(table[1].split()[-2])
    assert times_less == pytest.approx(sizes["jax.nn", 8192] / sizes["memeff", 8192], rel=0.05)
    input_sizes = {row["input_bytes"] for row in rows}
    assert input_sizes == {3 * 4 * 8 * 64 * 4096, 3 * 4 * 8 * 64 * 8192}


def test_memory_is_drawn_as_text_too(capsys, monkeypatch, tmp_path):
    fields = {
        "length": 2**12,
        "mask": "causal",
        "mode": "gradient",
        "extra": "plain",
        "input_bytes": 1,
    }
    rows = [
        fields | {"implementation": "jax.nn", "temp_bytes": 2**27},
        fields | {"implementation": "memeff", "temp_bytes": 3 * 2**20},
    ]
    monkeypatch.setattr(command_line, "memory_table", lambda *_: rows)
    path = tmp_path / "chart.txt"
    run(capsys, "memory", "--length", "4k", "--mode", "gradient", "--plot", str(path))
    bars = path.read_text().splitlines()[2:]
    assert bars == ["  4k jax.nn  ######## 128 MiB", "  4k memeff  ### 3 MiB"]
    with pytest.raises(SystemExit):
        run(capsys, "speed", "--plot", str(path))
    assert "draws memory: use the table memory" in capsys.readouterr().err


def test_what_xla_cannot_compile_follows_the_growth_up_to_there():
    (row,) = bench.memory_table([2**20], [bench.Case(0, mask="full")], ["jax.nn"])
    largest = bench.temp_bytes("jax.nn", bench.Case(2**17, mask="full"))
    assert row["extrapolated"]
    assert row["temp_bytes"] == pytest.approx(64 * largest, rel=1e-3)
    assert f"~{bench.human(row['temp_bytes'])}" in bench.memory_markdown([row])
    assert not memory.too_large("memeff", bench.Case(2**18, mask="full"))
    _, note = calls.attempt(calls.compiled, "jax.nn", bench.Case(2**20))
    assert note is not None
    assert note.startswith("out of memory: 2^39 logits")


@pytest.mark.slow
def test_a_memory_limit_is_kept_or_refused_in_a_note():
    names = ["memeff", "memeff@8MiB", "memeff@1kB"]
    rows = bench.memory_table([1024], [bench.Case(0)], names)
    free, limited, refused = rows
    assert limited["temp_bytes"] <= 2**23 < free["temp_bytes"]
    assert refused["temp_bytes"] is None
    assert refused["note"].startswith("memory_limit=")
    assert refused["note"] in bench.memory_markdown(rows)


# ---- measured peaks


class Device:
    """A device that counts as a GPU does: the bytes in use, and one maximum for all time."""

    def __init__(self):
        self.peak = 0

    def memory_stats(self, passing=0):
        """Return the statistics after a call that took `passing` bytes and freed them."""
        used = sum(array.nbytes for array in jax.live_arrays())
        self.peak = max(self.peak, used + passing)
        return {"bytes_in_use": used, "peak_bytes_in_use": self.peak, "bytes_limit": 2**40}


def without_wait(call) -> bench.Run:
    """Return a run whose result is there at once."""
    return bench.Run(call, lambda result: None)


def test_every_call_s_peak_is_measured_though_larger_ones_came_before(monkeypatch):
    device = Device()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    device.memory_stats(passing=2**25)  # compiling tried something
    case = bench.Case(96, heads=4, kv_heads=4, head_dim=8, mode="gradient")
    input_arrays(case)
    for name, size in (
        ("memeff", 3 * 2**24 + 4),
        ("jax.nn", 2**20),
        ("memeff", 2**20),
        ("memeff", 2**26),
        ("memeff", 12345678),
    ):
        assert size > calls.call_bytes(name, case) > 0

        def call(size=size):
            device.memory_stats(passing=size)
            return ()

        assert memory.run_and_watch(name, case, without_wait(call)) == ((), size)
    monkeypatch.setattr(speed, "prepare", lambda *_: without_wait(call))
    monkeypatch.setattr(speed, "error_of", lambda *_: 0.0)
    row = next(bench.speed_table([case], ["memeff"], rounds=1))
    assert row["peak_bytes"] == size
    assert f"| {bench.human(size)} |" in bench.speed_markdown([row])


@pytest.mark.gpu
def test_a_gpu_tells_every_peak():
    """Call longer cases first, so that no later one raises the device's maximum by itself."""
    cases = []
    for length in (4096, 1024):
        for mode in bench.MODES[::-1]:
            cases.append(bench.Case(length, dtype="bfloat16", mode=mode))
    for row in bench.speed_table(cases, ["jax.nn", "memeff", "jax.nn:cudnn"], rounds=1):
        case = bench.Case(row["length"], dtype="bfloat16", mode=row["mode"])
        # the peak may lack the program's tables of pointers
        least = calls.call_bytes(row["implementation"], case) - 1024
        assert row["note"] or least <= row["peak_bytes"] < 2**33, row


def test_torch_s_peak_is_torch_s(monkeypatch):
    class Cuda:
        def is_available(self):
            return True

        def memory_allocated(self):
            return 1000

        def reset_peak_memory_stats(self):
            self.peak = 1000

        def max_memory_allocated(self):
            return self.peak

    class Torch:
        cuda = Cuda()

    def call():
        Torch.cuda.peak = 1789
        return ()

    monkeypatch.setitem(sys.modules, "torch", Torch)
    result = memory.run_and_watch("torch", bench.Case(8), without_wait(call))
    assert result == ((), 789)
