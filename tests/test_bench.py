"""`python -m memeff.bench` on tiny shapes: its tables, its JSON lines, and the laws that its figures must obey."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest

import memeff.bench.__main__ as command_line
from memeff import bench
from memeff.bench import calls, doctor, extras, implementations, memory, options, speed, truth
from memeff.bench.cases import call_title, case_row, input_arrays

TINY = ["--length", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--batch", "2"]


def run(capsys, *arguments):
    command_line.main(arguments)
    return capsys.readouterr().out


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_speed_prints_a_table_and_writes_json_lines_and_a_plot(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    plot = tmp_path / "speed.png"
    names = ["memeff:64", "memeff:96", "jax.nn"]
    text = run(capsys, "speed", *TINY, "--mask", "causal", "--mode", "gradient", "--implementation", *names,
               "--rounds", "2", "--json", str(out), "--plot", str(plot))  # fmt: skip
    heading, sizes, _, *table = text.splitlines()
    assert jax.__version__ in heading and "python -m memeff.bench speed --length 96" in heading
    assert sizes == "B=2 N=4 K=2 H=8 float32"
    assert len(table) == 2 + len(names) and all(line.count("|") == 9 for line in table)
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = lines(out)
    assert [row["implementation"] for row in rows] == names and rows[0]["temp_bytes"] != rows[1][
        "temp_bytes"
    ]
    for row in rows:
        # a CPU tells no peak, so the table has no column for it
        assert row["note"] is None and row["peak_bytes"] is None
        assert (row["batch"], row["heads"], row["kv_heads"], row["head_dim"]) == (2, 4, 2, 8)
        assert (row["dtype"], row["mask"], row["mode"]) == ("float32", "causal", "gradient")
        assert 0 < row["seconds_min"] <= row["seconds"] and row["temp_bytes"] > 0
        work = 3.5 * 0.5 * 4 * 2 * 4 * row["length"] ** 2 * 8
        assert row["flops_per_second"] == pytest.approx(work / row["seconds"])
        assert 0 < row["error"] < 1e-5
        assert {"device", "jax", "memeff", "python"} <= set(row)
    assert all(
        row["speed_against_jax_nn"] == 1 for row in rows if row["implementation"] == "jax.nn"
    )


def test_memory_prints_a_table_in_which_memeff_is_linear_and_plain_attention_quadratic(
    capsys, tmp_path
):
    out, plot = tmp_path / "rows.jsonl", tmp_path / "memory.svg"
    text = run(
        capsys,
        "memory",
        "--length",
        "4k",
        "8k",
        "--mode",
        "gradient",
        "--json",
        str(out),
        "--plot",
        str(plot),
    )
    header, _, *table = text.splitlines()[3:]
    assert "causal forward + gradient: jax.nn" in header and [
        line.split()[1] for line in table
    ] == ["4k", "8k"]
    assert b"<svg" in plot.read_bytes()
    found = {(row["implementation"], row["length"]): row["temp_bytes"] for row in lines(out)}
    growth = {name: found[name, 8192] / found[name, 4096] for name in ("memeff", "jax.nn")}
    assert growth["memeff"] <= 2.15 and 3.9 < growth["jax.nn"] < 4.1
    times_less = float(table[1].split()[-2])
    assert times_less == pytest.approx(found["jax.nn", 8192] / found["memeff", 8192], rel=0.05)
    assert {row["input_bytes"] for row in lines(out)} == {
        3 * 4 * 8 * 64 * 4096,
        3 * 4 * 8 * 64 * 8192,
    }


def test_memory_is_drawn_as_text_too(capsys, monkeypatch, tmp_path):
    sizes = {"jax.nn": 2**27, "memeff": 3 * 2**20}
    of = {"length": 2**12, "mask": "causal", "mode": "gradient", "extra": "plain", "input_bytes": 1}
    rows = [of | {"implementation": name, "temp_bytes": size} for name, size in sizes.items()]
    monkeypatch.setattr(command_line, "memory_table", lambda *_: rows)
    path = tmp_path / "chart.txt"
    run(capsys, "memory", "--length", "4k", "--mode", "gradient", "--plot", str(path))
    bars = path.read_text().splitlines()[2:]
    assert bars == ["  4k jax.nn  ######## 128 MiB", "  4k memeff  ### 3 MiB"]
    with pytest.raises(SystemExit):
        run(capsys, "speed", "--plot", str(path))
    assert "draws memory: use the table memory" in capsys.readouterr().err


def test_what_xla_cannot_compile_follows_the_growth_up_to_there():
    row = bench.memory_table([2**20], [bench.Case(0, mask="full")], ["jax.nn"])[0]
    largest = bench.temp_bytes("jax.nn", bench.Case(2**17, mask="full"))
    assert row["extrapolated"] and row["temp_bytes"] == pytest.approx(64 * largest, rel=1e-3)
    assert f"~{bench.human(row['temp_bytes'])}" in bench.memory_markdown([row])
    assert not memory.too_large("memeff", bench.Case(2**18, mask="full"))
    note = calls.attempt(calls.compiled, "jax.nn", bench.Case(2**20))[1]
    assert note is not None and note.startswith("out of memory: 2^39 logits")


def test_what_cannot_run_is_a_note_and_the_rest_goes_on(monkeypatch):
    case = bench.Case(64, heads=2, kv_heads=2, head_dim=8)
    monkeypatch.setattr(calls, "device_bytes", lambda: 2**17)
    big = bench.Case(256, heads=2, kv_heads=2, head_dim=8)
    rows = list(
        bench.speed_table([case, big], ["memeff:64", "jax.nn", "jax.nn:cudnn", "torch"], rounds=1)
    )
    notes = {(row["length"], row["implementation"]): row["note"] for row in rows}
    assert notes[64, "memeff:64"] is None and notes[64, "jax.nn"] is None
    assert notes[256, "jax.nn"].startswith("out of memory: needs ")
    assert "cuDNN needs an NVIDIA GPU" in notes[64, "jax.nn:cudnn"]
    text = bench.speed_markdown(rows)
    assert "out of memory" in text and text.count("\n") == 1 + len(rows)
    (panel,) = bench.figure(rows, "seconds").axes
    labels, markers = zip(
        *((line.get_label(), (line.get_marker(), *line.get_xdata())) for line in panel.lines),
        strict=True,
    )
    assert {"memeff:64: out of memory at 256", "jax.nn: out of memory at 256"} <= set(labels)
    # what never ran has no line
    assert markers.count(("X", 256)) == 2 and not any("cudnn" in label for label in labels)


def test_an_exception_of_a_guest_becomes_one_line():
    def fail(text):
        raise RuntimeError(text)

    assert calls.attempt(fail, "RESOURCE_EXHAUSTED: Out of memory\n while trying to allocate") == (
        None,
        "out of memory",
    )
    assert calls.attempt(fail, "CUDA out of memory. Tried") == (None, "out of memory")
    assert calls.attempt(fail, "no\nkernel") == (None, "no kernel")


def test_error_is_against_the_formula_of_the_last_head():
    case = bench.Case(40, batch=2, heads=4, kv_heads=2, head_dim=8, mode="gradient")
    right = calls.prepare("memeff", case).result()
    assert truth.error_of(right, case) < 1e-5
    for wrong in (0, 1):  # out, dq
        result = list(right)
        result[wrong] = 1.01 * result[wrong]
        assert truth.error_of(tuple(result), case) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("mode", ["jvp", "hvp"])
def test_error_of_derivatives(mode):
    case = bench.Case(40, batch=2, heads=4, kv_heads=2, head_dim=8, mode=mode)
    right = calls.prepare("memeff", case).result()
    assert truth.error_of(right, case) < 1e-5
    wrong = jax.tree.map(lambda x: 1.01 * x, (right[0], right[1]))
    assert truth.error_of(wrong, case) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.slow
def test_scores_and_masks_beside_their_array():
    """By functions, and by an array for who takes no functions: both are right, and the array counts as memory."""
    names = ["memeff:32", "jax.nn", "torch"]
    for extra in extras.NAMES:
        case = bench.Case(
            72, heads=4, kv_heads=2, head_dim=8, mask="full", mode="gradient", extra=extra
        )
        rows = {row["implementation"]: row for row in bench.speed_table([case], names, rounds=1)}
        right = names[:1] if extra == "softcap" else names[:2]
        assert all(rows[name]["error"] < 1e-5 for name in right), rows
        assert (
            extra == "plain" or call_title(rows["memeff:32"]) == f"full forward + gradient, {extra}"
        )
        elements = {
            "alibi": 4 * 4 * 72**2,
            "t5": 4 * 4 * 72**2,
            "window": 72**2,
            "documents": 72**2,
        }
        assert extra == "softcap" or calls.extra_array_bytes("jax.nn", case) == elements.get(
            extra, 0
        )
    assert rows["torch"]["note"] is not None


def test_every_implementation_that_is_installed_agrees():
    case = bench.Case(48, heads=4, kv_heads=2, head_dim=16, mode="gradient")
    rows = list(bench.speed_table([case], rounds=1))
    assert {"memeff", "jax.nn"} <= {row["implementation"] for row in rows}
    assert all(row["note"] or row["error"] < 1e-5 for row in rows)
    assert all(row["note"] is None for row in rows if row["implementation"] in ("memeff", "jax.nn"))


class Device:
    """One that counts as a GPU does: what lives, and one maximum for all time."""

    def __init__(self):
        self.peak = 0

    def memory_stats(self, passing=0):
        used = sum(array.nbytes for array in jax.live_arrays())
        self.peak = max(self.peak, used + passing)
        return {"bytes_in_use": used, "peak_bytes_in_use": self.peak, "bytes_limit": 2**40}


def test_every_call_s_peak_is_measured_though_larger_ones_came_before(monkeypatch):
    device = Device()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    device.memory_stats(passing=2**25)  # compiling tried something
    case = bench.Case(96, heads=4, kv_heads=4, head_dim=8, mode="gradient")
    input_arrays(case)
    for name, takes in (
        ("memeff", 3 * 2**24 + 4),
        ("jax.nn", 2**20),
        ("memeff", 2**20),
        ("memeff", 2**26),
        ("memeff", 12345678),
    ):
        assert takes > calls.call_bytes(name, case) > 0

        def call(takes=takes):
            device.memory_stats(passing=takes)
            return ()

        assert memory.run_and_watch(name, case, bench.Run(call, lambda result: None)) == ((), takes)
    monkeypatch.setattr(speed, "prepare", lambda *_: bench.Run(call, lambda result: None))
    monkeypatch.setattr(speed, "error_of", lambda *_: 0.0)
    row = next(bench.speed_table([case], ["memeff"], rounds=1))
    assert row["peak_bytes"] == takes and f"| {bench.human(takes)} |" in bench.speed_markdown([row])


@pytest.mark.gpu
def test_a_gpu_tells_every_peak():
    """Longer calls first, so that no later one raises the device's maximum by itself."""
    cases = [
        bench.Case(n, dtype="bfloat16", mode=mode)
        for n in (4096, 1024)
        for mode in bench.MODES[::-1]
    ]
    for row in bench.speed_table(cases, ["jax.nn", "memeff", "jax.nn:cudnn"], rounds=1):
        case = bench.Case(row["length"], dtype="bfloat16", mode=row["mode"])
        # its tables of pointers are not there
        least = calls.call_bytes(row["implementation"], case) - 1024
        assert row["note"] or least <= row["peak_bytes"] < 2**33, row


def test_torch_s_peak_is_torch_s(monkeypatch):
    class Cuda:
        is_available, memory_allocated = staticmethod(lambda: True), staticmethod(lambda: 1000)

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
    assert memory.run_and_watch("torch", bench.Case(8), bench.Run(call, lambda result: None)) == (
        (),
        789,
    )


def test_decode_is_the_last_query_against_every_key(capsys, tmp_path):
    out, names = tmp_path / "rows.jsonl", ["memeff", "jax.nn"]
    arguments = ["--decode", "--rounds", "1", "--implementation", *names, "--json", str(out)]
    text = run(capsys, *TINY, *arguments)
    assert "T=1 B=2 N=4 K=2 H=8 float32" in text and "| key and value B/s |" in text
    rows = lines(out)
    assert [(row["query_length"], row["mask"], row["mode"]) for row in rows] == [
        (1, "causal", "forward")
    ] * 2
    for row in rows:
        assert row["flops_per_second"] == pytest.approx(4 * 2 * 4 * 96 * 8 / row["seconds"])
        assert row["bytes_per_second"] == pytest.approx(2 * 2 * 96 * 2 * 8 * 4 / row["seconds"])
        assert row["error"] < 1e-5  # against all 96 keys


def test_fewer_queries_than_keys_are_the_last():
    case = bench.Case(40, heads=2, kv_heads=2, head_dim=8, mode="gradient", query_length=7)
    rows = {
        row["implementation"]: row
        for row in bench.speed_table([case], ["memeff", "reference", "jax.nn"], rounds=1)
    }
    assert rows["memeff"]["error"] < 1e-5 and rows["reference"]["error"] < 1e-5
    assert rows["jax.nn"]["note"] == "its causal queries are the first, and these are the last"
    full = dataclasses.replace(case, mask="full")
    assert all(
        row["error"] < 1e-5 for row in bench.speed_table([full], ["memeff", "jax.nn"], rounds=1)
    )


def test_names_tell_chunk_and_memory(monkeypatch):
    told = []
    monkeypatch.setattr(
        implementations.memeff, "dot_product_attention", lambda **options: told.append(options)
    )
    for name in (
        "memeff",
        "memeff:64",
        "memeff@512MiB",
        "memeff:64@1.5GiB",
        "memeff@1000000",
        "memeff:xla@2GB",
        "memeff:pallas",
        "memeff:fused",
        "memeff:fastest",
    ):
        implementations.attention(name)()
    assert told == [
        {"chunk_size": None, "implementation": None},
        {"chunk_size": 64, "implementation": None},
        {"chunk_size": None, "implementation": None, "memory_limit": "512MiB"},
        {"chunk_size": 64, "implementation": None, "memory_limit": "1.5GiB"},
        {"chunk_size": None, "implementation": None, "memory_limit": 1000000},
        {"chunk_size": None, "implementation": "xla", "memory_limit": "2GB"},
        {"chunk_size": None, "implementation": "pallas"},
        {"chunk_size": None, "backward": "fused"},
        {"chunk_size": None, "backward": "fastest"},
    ]


def test_a_memory_limit_is_kept_or_refused_in_a_note():
    rows = bench.memory_table([1024], [bench.Case(0)], ["memeff", "memeff@8MiB", "memeff@1kB"])
    assert rows[1]["temp_bytes"] <= 2**23 < rows[0]["temp_bytes"] and rows[2]["temp_bytes"] is None
    assert rows[2]["note"].startswith("memory_limit=") and rows[2]["note"] in bench.memory_markdown(
        rows
    )


def test_lines_are_written_as_they_come(monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"

    def broken(cases, names, rounds):
        yield case_row("memeff", cases[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "speed_table", broken)
    with pytest.raises(KeyboardInterrupt):
        command_line.main([*TINY, "--json", str(out)])
    assert [row["length"] for row in lines(out)] == [96]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lenght", "5"], "unrecognized arguments: --lenght"),
        (["quick"], "table 'quick' is not known: use speed or memory."),
        (["--length", "1.5k"], "expected a whole number above 0, such as 4096 or 64k, got '1.5k'"),
        (["--length", "0"], "expected a whole number above 0"),
        (["--heads", "8", "--kv-heads", "3"], "--heads 8 must be a multiple of --kv-heads 3."),
        (
            ["--implementation", "flash"],
            "implementation 'flash' is not known: use memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest]",
        ),
        (["--implementation", "memeff:fast"], "implementation 'memeff:fast' is not known"),
        (
            ["--implementation", "jax.nn@1GiB"],
            "implementation 'jax.nn@1GiB' is not known: use memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest][@MEMORY]",
        ),
        (
            ["--query-length", "2k", "--length", "4k", "1k"],
            "--query-length 2048 must be at most --length 1024.",
        ),
        (["memory", "--implementation", "jax.nn:cudnn"], "jax.nn:cudnn: cuDNN needs an NVIDIA GPU"),
    ],
)
def test_a_wrong_option_gets_a_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_units():
    assert [bench.human(x) for x in (0, 1, 1023, 2**20, 1000 * 2**20, 128 * 2**40)] == [
        "0 B", "1 B", "0.999 KiB", "1 MiB", "0.977 GiB", "128 TiB"
    ]  # fmt: skip
    assert [bench.tokens(x) for x in (1000, 1024, 65536, 2**20)] == ["1000", "1k", "64k", "1M"]
    assert bench.Case(1024, heads=2, head_dim=64, mask="full").flops == 4 * 2 * 1024**2 * 64


def test_the_package_does_not_import_the_bench():
    code = (
        "import memeff, sys; assert not {'memeff.bench', 'matplotlib', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_doctor_says_pass_fail_and_cannot_run(capsys, monkeypatch):
    """memeff and plain attention pass; one that forgets the scale is told from them, and one that is not there."""
    attention = implementations.attention
    plain = attention("jax.nn")
    forgetful = functools.partial(plain, scale=1.0)
    for module in (calls, implementations):
        monkeypatch.setattr(
            module, "attention", lambda name: forgetful if name == "other" else attention(name)
        )
    verdicts = {
        "memeff": "pass",
        "memeff:128": "pass",
        "jax.nn": "pass",
        "other": "fail",
        "jax.nn:cudnn": "cannot run",
    }
    rows = doctor.check_implementations(tuple(verdicts), doctor.CASES[1:4:2])
    assert [row["verdict"] for row in rows] == [
        verdict for verdict in verdicts.values() for _ in range(2)
    ], rows
    text = doctor.doctor_markdown(rows)
    assert (
        re.search(r"memeff:128 \| +pass \(\de-0\d\) \|", text)
        and "cannot run: cuDNN needs an NVIDIA GPU" in text
    )

    def chosen(names):
        return [row for row in rows if row["implementation"] in names]

    monkeypatch.setattr(doctor, "check_implementations", chosen)
    monkeypatch.setattr(options, "why_not", lambda *_: None)
    for names, code in ((["memeff", "jax.nn:cudnn"], 0), (["memeff", "other"], 1)):
        with pytest.raises(SystemExit) as end:
            command_line.main(["--doctor", "--implementation", *names])
        assert end.value.code == code
    assert "against float64" in capsys.readouterr().out


def test_doctor_s_truth_is_the_oracle_s():
    case = bench.Case(37, batch=2, heads=4, kv_heads=2, head_dim=8, mode="gradient")
    arrays = input_arrays(case)
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    out, _ = oracle.attention(q, k, v, is_causal=True)
    grads = oracle.gradients(q, k, v, is_causal=True, dout=dout, dlse=np.zeros(dout.shape[:-1]))
    *found, tangent = truth.exact_attention(arrays, case, np.arange(37))
    for x, y in zip(found, (out, *(grads[n] for n in ("query", "key", "value"))), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    along = sum((grads[n] * x).sum() for n, x in (("query", q), ("key", k), ("value", v)))
    np.testing.assert_allclose((tangent * dout).sum(), along, rtol=1e-12)
