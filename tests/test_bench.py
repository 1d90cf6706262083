"""Run `python -m memeff.bench` on tiny shapes: the table of speed, JSON lines, names and options.

tests/test_bench_memory.py tests the table of memory, and tests/test_doctor.py the errors.
"""

import dataclasses
import json

import jax
import pytest

import memeff.bench.__main__ as command_line
from memeff import bench
from memeff.bench import caches, calls, extras, implementations, speed
from memeff.bench.cases import call_title, case_row
from memeff.bench.formatting import count_per_second

pytestmark = pytest.mark.once

TINY = ["--length", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--batch", "2"]


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Let a sample be few calls. What a call takes is not tested."""
    monkeypatch.setattr(speed, "CALLS_PER_SAMPLE", 5)


def run(capsys, *arguments):
    """Run the command line and return what it prints."""
    command_line.main(arguments)
    return capsys.readouterr().out


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the table of speed


def test_speed_prints_a_table_and_writes_json_lines_and_a_plot(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    plot = tmp_path / "speed.png"
    names = ["memeff:64", "memeff:96", "jax.nn"]
    calls_to_time = [*TINY, "--mask", "causal", "--mode", "gradient", "--implementation", *names]
    files = ["--json", str(out), "--plot", str(plot)]
    text = run(capsys, "speed", *calls_to_time, "--rounds", "2", *files)
    heading, sizes, _, *table = text.splitlines()
    assert jax.__version__ in heading
    assert "python -m memeff.bench speed --length 96" in heading
    assert sizes == "B=2 N=4 K=2 H=8 float32"
    assert len(table) == 2 + len(names)
    assert all(line.count("|") == 9 for line in table)
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = read_rows(out)
    assert [row["implementation"] for row in rows] == names
    assert rows[0]["temp_bytes"] != rows[1]["temp_bytes"]
    for row in rows:
        # a CPU tells no peak, so the table has no column for it
        assert row["note"] is None
        assert row["peak_bytes"] is None
        assert (row["batch"], row["heads"], row["kv_heads"], row["head_dim"]) == (2, 4, 2, 8)
        assert (row["dtype"], row["mask"], row["mode"]) == ("float32", "causal", "gradient")
        assert 0 < row["seconds_min"] <= row["seconds"]
        assert row["temp_bytes"] > 0
        work = 3.5 * 0.5 * 4 * 2 * 4 * row["length"] ** 2 * 8
        assert row["flops_per_second"] == pytest.approx(work / row["seconds"])
        assert 0 < row["error"] < 1e-5
        assert {"device", "jax", "memeff", "python"} <= set(row)
        if row["implementation"] == "jax.nn":
            assert row["speed_against_jax_nn"] == 1


def test_what_cannot_run_is_a_note_and_the_rest_goes_on(monkeypatch):
    small = bench.Case(64, heads=2, kv_heads=2, head_dim=8)
    big = bench.Case(256, heads=2, kv_heads=2, head_dim=8)
    monkeypatch.setattr(calls, "device_bytes", lambda: 2**17)
    names = ["memeff:64", "jax.nn", "jax.nn:cudnn", "torch"]
    rows = list(bench.speed_table([small, big], names, rounds=1))
    notes = {(row["length"], row["implementation"]): row["note"] for row in rows}
    assert notes[64, "memeff:64"] is None
    assert notes[64, "jax.nn"] is None
    assert notes[256, "jax.nn"].startswith("out of memory: needs ")
    assert "cuDNN needs an NVIDIA GPU" in notes[64, "jax.nn:cudnn"]
    text = bench.speed_markdown(rows)
    assert "out of memory" in text
    assert text.count("\n") == 1 + len(rows)
    (panel,) = bench.figure(rows, "seconds").axes
    labels = [line.get_label() for line in panel.lines]
    markers = [(line.get_marker(), *line.get_xdata()) for line in panel.lines]
    assert {"memeff:64: out of memory at 256", "jax.nn: out of memory at 256"} <= set(labels)
    assert markers.count(("X", 256)) == 2
    # what never ran has no line
    assert not any("cudnn" in label for label in labels)


def test_an_exception_of_a_guest_becomes_one_line():
    def fail(text):
        raise RuntimeError(text)

    allocation = "RESOURCE_EXHAUSTED: Out of memory\n while trying to allocate"
    assert calls.attempt(fail, allocation) == (None, "out of memory")
    assert calls.attempt(fail, "CUDA out of memory. Tried") == (None, "out of memory")
    assert calls.attempt(fail, "no\nkernel") == (None, "no kernel")


@pytest.mark.slow
def test_scores_and_masks_beside_their_array():
    """Results are right by the functions that memeff takes, and by the array that others take.

    The array counts as memory.
    """
    names = ["memeff:32", "jax.nn", "torch"]
    array_elements = {
        "plain": 0,
        "alibi": 4 * 4 * 72**2,
        "t5": 4 * 4 * 72**2,
        "window": 72**2,
        "documents": 72**2,
    }
    for extra in extras.NAMES:
        case = bench.Case(
            72, heads=4, kv_heads=2, head_dim=8, mask="full", mode="gradient", extra=extra
        )
        rows = {row["implementation"]: row for row in bench.speed_table([case], names, rounds=1)}
        right = names[:1] if extra == "softcap" else names[:2]
        assert all(rows[name]["error"] < 1e-5 for name in right), rows
        if extra != "plain":
            assert call_title(rows["memeff:32"]) == f"full forward + gradient, {extra}"
        if extra != "softcap":
            assert calls.extra_array_bytes("jax.nn", case) == array_elements[extra]
    assert rows["torch"]["note"] is not None


def test_every_implementation_that_is_installed_agrees():
    case = bench.Case(48, heads=4, kv_heads=2, head_dim=16, mode="gradient")
    rows = list(bench.speed_table([case], rounds=1))
    assert {"memeff", "jax.nn"} <= {row["implementation"] for row in rows}
    for row in rows:
        assert row["note"] or row["error"] < 1e-5
        if row["implementation"] in ("memeff", "jax.nn"):
            assert row["note"] is None


def test_decode_is_the_last_query_against_every_key(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ["memeff", "jax.nn"]
    arguments = ["--decode", "--rounds", "1", "--implementation", *names, "--json", str(out)]
    text = run(capsys, *TINY, *arguments)
    assert "T=1 B=2 N=4 K=2 H=8 float32" in text
    assert "| key and value B/s |" in text
    rows = read_rows(out)
    assert len(rows) == 2
    for row in rows:
        assert (row["query_length"], row["mask"], row["mode"]) == (1, "causal", "forward")
        operations = 4 * 2 * 4 * 96 * 8
        assert row["flops_per_second"] == pytest.approx(operations / row["seconds"])
        size = 2 * 2 * 96 * 2 * 8 * 4
        assert row["bytes_per_second"] == pytest.approx(size / row["seconds"])
        assert row["error"] < 1e-5  # against all 96 keys


@pytest.mark.slow
def test_decode_measures_the_caches():
    case = bench.Case(128, batch=2, heads=4, kv_heads=2, head_dim=8, query_length=2)
    rows = {row["implementation"]: row for row in bench.speed_table([case], rounds=1)}
    errors = {name: rows[name]["error"] for name in caches.STANDARD}
    assert errors["memeff:cache"] == errors["memeff:pages64"] < 1e-5
    assert 1e-5 < errors["memeff:int8"] < 0.03
    text = bench.speed_markdown(list(rows.values()))
    assert "| tokens/s |" in text
    seconds = rows["memeff:int8"]["seconds"]
    assert f" {count_per_second(4 / seconds)} |" in text
    notes = [
        next(bench.speed_table([wrong], [name], rounds=1))["note"]
        for name, wrong in (
            ("memeff:cache", dataclasses.replace(case, mode="gradient")),
            ("memeff:pages48", case),
        )
    ]
    assert notes[0].startswith("caches run causal forwards of the newest queries")
    assert notes[1] == "pages of 48 tokens do not divide 128 keys"


def test_fewer_queries_than_keys_are_the_last():
    case = bench.Case(40, heads=2, kv_heads=2, head_dim=8, mode="gradient", query_length=7)
    table = bench.speed_table([case], ["memeff", "reference", "jax.nn"], rounds=1)
    rows = {row["implementation"]: row for row in table}
    assert rows["memeff"]["error"] < 1e-5
    assert rows["reference"]["error"] < 1e-5
    assert (
        rows["jax.nn"]["note"] == "its causal order has no offset, and these queries are the last"
    )
    full = dataclasses.replace(case, mask="full")
    for row in bench.speed_table([full], ["memeff", "jax.nn"], rounds=1):
        assert row["error"] < 1e-5


# ---- the command line


def test_names_tell_chunk_and_memory(monkeypatch):
    calls_of_memeff = []

    def record(**options):
        calls_of_memeff.append(options)

    monkeypatch.setattr(implementations.memeff, "dot_product_attention", record)
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
    assert calls_of_memeff == [
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


def test_lines_are_written_as_they_come(monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"

    def broken(cases, names, rounds):
        yield case_row("memeff", cases[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "speed_table", broken)
    with pytest.raises(KeyboardInterrupt):
        command_line.main([*TINY, "--json", str(out)])
    assert [row["length"] for row in read_rows(out)] == [96]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lenght", "5"], "unrecognized arguments: --lenght"),
        (["quick"], "table 'quick' is not known: use speed or memory, or"),
        (["doctor"], "The doctor is --doctor."),
        (["--batch", "2", "losses"], "or begin with hard, losses, arguments, devices or report."),
        (["--length", "1.5k"], "expected a whole number above 0, such as 4096 or 64k, got '1.5k'"),
        (["--length", "0"], "expected a whole number above 0"),
        (["--heads", "8", "--kv-heads", "3"], "--heads 8 must be a multiple of --kv-heads 3."),
        (
            ["--implementation", "flash"],
            "implementation 'flash' is not known: "
            "use memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest]",
        ),
        (["--implementation", "memeff:fast"], "implementation 'memeff:fast' is not known"),
        (
            ["--implementation", "jax.nn@1GiB"],
            "implementation 'jax.nn@1GiB' is not known: "
            "use memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest][@MEMORY]",
        ),
        (
            ["--query-length", "2k", "--length", "4k", "1k"],
            "--query-length 2048 must be at most --length 1024.",
        ),
        (["memory", "--implementation", "jax.nn:cudnn"], "jax.nn:cudnn: cuDNN needs an NVIDIA GPU"),
        (["--query-length", "8", "--with", "alibi"], "omit --query-length."),
        (["--implementation", "memeff:pages0"], "implementation 'memeff:pages0' is not known"),
        (["memory", "--plot", "x.docx"], "argument --plot: 'x.docx' must end in .png, .svg, .pdf"),
        (["devices", "--plot", "x.txt"], "argument --plot: 'x.txt' must end in .png, .svg, .pdf"),
        (["--doctor", "--length", "3"], "--doctor has cases of its own: omit all options but"),
        (["--json", "."], "argument --json: . is a folder: name a file in it"),
        *(
            ([*table, option, "nowhere/x.svg"], f"{option}: there is no folder nowhere: make")
            for table, option in [
                ([], "--json"),
                ([], "--save"),
                (["memory"], "--plot"),
                (["hard"], "--save"),
                (["losses"], "--save"),
                (["arguments"], "--save"),
                (["devices"], "--save"),
                (["devices"], "--plot"),
            ]
        ),
    ],
)
def test_a_wrong_option_gets_a_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_units():
    sizes = {
        0: "0 B",
        1: "1 B",
        1023: "0.999 KiB",
        2**20: "1 MiB",
        1000 * 2**20: "0.977 GiB",
        128 * 2**40: "128 TiB",
    }
    assert {size: bench.human(size) for size in sizes} == sizes
    assert [bench.tokens(x) for x in (1000, 1024, 65536, 2**20)] == ["1000", "1k", "64k", "1M"]
    assert bench.Case(1024, heads=2, head_dim=64, mask="full").flops == 4 * 2 * 1024**2 * 64
