"""`python -m memeff.bench` on tiny shapes: its tables, its JSON lines, and the laws that its figures must obey."""

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

from memeff import bench

TINY = ["--length", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--batch", "2"]


def run(capsys, *arguments):
    bench.main(arguments)
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
    assert len(table) == 2 + len(names) and all(line.count("|") == 10 for line in table)
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = lines(out)
    assert [row["implementation"] for row in rows] == names and rows[0]["temp_bytes"] != rows[1]["temp_bytes"]
    for row in rows:
        assert row["note"] is None and row["peak_bytes"] is None  # a CPU tells no peak
        assert (row["batch"], row["heads"], row["kv_heads"], row["head_dim"]) == (2, 4, 2, 8)
        assert (row["dtype"], row["mask"], row["mode"]) == ("float32", "causal", "gradient")
        assert 0 < row["seconds_min"] <= row["seconds"] and row["temp_bytes"] > 0
        work = 3.5 * 0.5 * 4 * 2 * 4 * row["length"] ** 2 * 8
        assert row["flops_per_second"] == pytest.approx(work / row["seconds"])
        assert 0 < row["error"] < 1e-5
        assert {"device", "jax", "memeff", "python"} <= set(row)
    assert all(row["speed_against_jax_nn"] == 1 for row in rows if row["implementation"] == "jax.nn")


def test_memory_prints_a_table_in_which_memeff_is_linear_and_plain_attention_quadratic(capsys, tmp_path):
    out, plot = tmp_path / "rows.jsonl", tmp_path / "memory.svg"
    text = run(capsys, "memory", "--length", "4k", "8k", "--mode", "gradient", "--json", str(out), "--plot", str(plot))
    header, _, *table = text.splitlines()[3:]
    assert "causal forward + gradient: jax.nn" in header and [line.split()[1] for line in table] == ["4k", "8k"]
    assert b"<svg" in plot.read_bytes()
    found = {(row["implementation"], row["length"]): row["temp_bytes"] for row in lines(out)}
    growth = {name: found[name, 8192] / found[name, 4096] for name in ("memeff", "jax.nn")}
    assert growth["memeff"] <= 2.15 and 3.9 < growth["jax.nn"] < 4.1
    times_less = float(table[1].split()[-2])
    assert times_less == pytest.approx(found["jax.nn", 8192] / found["memeff", 8192], rel=0.05)
    assert {row["input_bytes"] for row in lines(out)} == {3 * 4 * 8 * 64 * 4096, 3 * 4 * 8 * 64 * 8192}


def test_what_xla_cannot_compile_follows_the_growth_up_to_there():
    row = bench.memory_table([2**20], [bench.Case(0, mask="full")], ["jax.nn"])[0]
    largest = bench.temp_bytes("jax.nn", bench.Case(2**17, mask="full"))
    assert row["extrapolated"] and row["temp_bytes"] == pytest.approx(64 * largest, rel=1e-3)
    assert f"~{bench.human(row['temp_bytes'])}" in bench.memory_markdown([row])
    assert not bench.too_large("memeff", bench.Case(2**18, mask="full"))
    note = bench.attempt(bench.compiled, "jax.nn", bench.Case(2**20))[1]
    assert note is not None and note.startswith("out of memory: 2^39 logits")


def test_what_cannot_run_is_a_note_and_the_rest_goes_on(monkeypatch):
    case = bench.Case(64, heads=2, kv_heads=2, head_dim=8)
    monkeypatch.setattr(bench, "device_bytes", lambda: 2**17)
    big = bench.Case(256, heads=2, kv_heads=2, head_dim=8)
    rows = bench.speed_table([case, big], ["memeff:64", "jax.nn", "jax.nn:cudnn", "torch"], rounds=1)
    notes = {(row["length"], row["implementation"]): row["note"] for row in rows}
    assert notes[64, "memeff:64"] is None and notes[64, "jax.nn"] is None
    assert notes[256, "jax.nn"].startswith("out of memory: needs ")
    assert "cuDNN needs an NVIDIA GPU" in notes[64, "jax.nn:cudnn"]
    text = bench.speed_markdown(rows)
    assert "out of memory" in text and text.count("\n") == 1 + len(rows)


def test_an_exception_of_a_guest_becomes_one_line():
    def fail(text):
        raise RuntimeError(text)

    assert bench.attempt(fail, "RESOURCE_EXHAUSTED: Out of memory\n while trying to allocate") == (None, "out of memory")
    assert bench.attempt(fail, "CUDA out of memory. Tried") == (None, "out of memory")
    assert bench.attempt(fail, "no\nkernel") == (None, "no kernel")


def test_error_is_against_the_formula_of_the_last_head():
    case = bench.Case(40, batch=2, heads=4, kv_heads=2, head_dim=8, mode="gradient")
    right = bench.prepare("memeff", case)
    assert bench.error_of(right, case) < 1e-5
    for wrong in (0, 1):  # out, dq

        def call(wrong=wrong):
            result = list(right.call())
            result[wrong] = 1.01 * result[wrong]
            return tuple(result)

        assert bench.error_of(bench.Run(call, right.wait), case) == pytest.approx(0.01, rel=1e-2)


def test_every_implementation_that_is_installed_agrees():
    case = bench.Case(48, heads=4, kv_heads=2, head_dim=16, mode="gradient")
    rows = bench.speed_table([case], rounds=1)
    assert {"memeff", "jax.nn"} <= {row["implementation"] for row in rows}
    assert all(row["note"] or row["error"] < 1e-5 for row in rows)
    assert all(row["note"] is None for row in rows if row["implementation"] in ("memeff", "jax.nn"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lenght", "5"], "unrecognized arguments: --lenght"),
        (["quick"], "table 'quick' is not known: use speed or memory."),
        (["--length", "1.5k"], "expected a whole number above 0, such as 4096 or 64k, got '1.5k'"),
        (["--length", "0"], "expected a whole number above 0"),
        (["--heads", "8", "--kv-heads", "3"], "--heads 8 must be a multiple of --kv-heads 3."),
        (["--implementation", "flash"], "implementation 'flash' is not known: use memeff[:CHUNK]"),
        (["--implementation", "memeff:fast"], "implementation 'memeff:fast' is not known"),
        (["memory", "--implementation", "jax.nn:cudnn"], "jax.nn:cudnn: cuDNN needs an NVIDIA GPU"),
    ],
)
def test_a_wrong_option_gets_a_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_units():
    assert [bench.human(x) for x in (0, 1, 1023, 2**20, 1000 * 2**20, 128 * 2**40)] == [
        "0 B", "1 B", "0.999 KiB", "1 MiB", "0.977 GiB", "128 TiB"
    ]  # fmt: skip
    assert [bench.tokens(x) for x in (1000, 1024, 65536, 2**20)] == ["1000", "1k", "64k", "1M"]
    assert bench.Case(1024, heads=2, head_dim=64, mask="full").flops == 4 * 2 * 1024**2 * 64


def test_the_package_does_not_import_the_bench():
    code = "import memeff, sys; assert not {'memeff.bench', 'matplotlib', 'tqdm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_doctor_says_pass_fail_and_cannot_run(capsys, monkeypatch):
    """memeff and plain attention pass; one that forgets the scale is told from them, and one that is not there."""
    attention, plain = bench.attention, bench.attention("jax.nn")
    forgetful = functools.partial(plain, scale=1.0)
    monkeypatch.setattr(bench, "attention", lambda name: forgetful if name == "other" else attention(name))
    verdicts = {"memeff": "pass", "memeff:128": "pass", "jax.nn": "pass", "other": "fail", "jax.nn:cudnn": "cannot run"}
    rows = bench.doctor(tuple(verdicts), bench.DOCTOR_CASES[1:4:2])
    assert [row["verdict"] for row in rows] == [verdict for verdict in verdicts.values() for _ in range(2)], rows
    text = bench.doctor_markdown(rows)
    assert re.search(r"memeff:128 \| +pass \(\de-0\d\) \|", text) and "cannot run: cuDNN needs an NVIDIA GPU" in text
    monkeypatch.setattr(bench, "doctor", lambda names: [row for row in rows if row["implementation"] in names])
    monkeypatch.setattr(bench, "why_not", lambda *_: None)
    for names, code in ((["memeff", "jax.nn:cudnn"], 0), (["memeff", "other"], 1)):
        with pytest.raises(SystemExit) as end:
            bench.main(["--doctor", "--implementation", *names])
        assert end.value.code == code
    assert "against float64" in capsys.readouterr().out


def test_doctor_s_truth_is_the_oracle_s():
    case = bench.Case(37, batch=2, heads=4, kv_heads=2, head_dim=8, mode="gradient")
    arrays = bench.inputs(case.shapes, case.dtype)
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    out, _ = oracle.attention(q, k, v, is_causal=True)
    grads = oracle.gradients(q, k, v, is_causal=True, dout=dout, dlse=np.zeros(dout.shape[:-1]))
    for x, y in zip(bench.exact(arrays, np.arange(37)), (out, *(grads[n] for n in ("query", "key", "value"))), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
