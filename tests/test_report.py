"""Compare the documentation's tables with the committed results, and test `report`.

`report` names each table that differs from its results.
"""

import json
from pathlib import Path

import pytest

import memeff.bench.__main__ as command_line
from memeff.bench import arguments as arguments_bench
from memeff.bench import devices, losses, memory_markdown, tables
from memeff.bench.cases import Case, case_row
from memeff.bench.report import write_report
from memeff.bench.results import FOLDER, read_lines, read_results, results_markdown
from memeff.bench.speed import time_figures

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "python -m memeff.bench",
    "python tests/replaced_results.py",
    "python tests/replaced_llama.py",
    "python -m models.decode_speed",
    "python -m models.train",
)
CELLS = [{"table": "cells"}, {"shape": "8k", "TFLOP/s": "648"}, {"shape": "16k"}]
CELLS_TABLE = "| shape | TFLOP/s |\n|---|---|\n| 8k | 648 |\n| 16k | |"
SPEED = case_row("memeff", Case(1024, mask="full")) | {
    "device": "a CPU",
    "seconds": 0.5,
    "seconds_min": 0.25,
    "speed_against_jax_nn": 2.0,
    "temp_bytes": 2**20,
    "peak_bytes": None,
    "error": 1e-7,
    "note": None,
}
LOSS = {"implementation": "memeff", "tokens": 1024, "features": 64}


def page(name, table):
    """Return a page that has one table between its markers."""
    return f"# Title\n\n<!-- table: {name} -->\n{table}\n<!-- end -->\n\nText.\n"


def repository(tmp_path, pages, tables):
    """Write a README.md, pages of docs/ and files of results; return their folder."""
    (tmp_path / FOLDER).mkdir(parents=True)
    pages = {"README.md": "# Title\n"} | pages
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    for name, records in tables.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (tmp_path / FOLDER / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def pages_below(root):
    return {path: path.read_text() for path in root.rglob("*.md")}


def test_the_tables_of_this_repository_are_those_of_its_results():
    assert write_report(ROOT, check=True) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / FOLDER).glob("*.jsonl")), ids=lambda path: path.stem
)
def test_every_result_says_where_it_is_from(path):
    description, *rows = read_lines(path)
    sources = [description] if description["table"] == "cells" else rows
    assert sources or description["rows_from"]
    for source in sources:
        assert {"date", "device", "python", "jax", "memeff", "command"} <= set(source)
        assert any(command in source["command"] for command in COMMANDS)


def test_report_rewrites_a_table_and_check_only_compares(tmp_path, capsys):
    old = page("kernels", "| old |")
    root = repository(tmp_path, {"docs/kernels.md": old}, {"kernels": CELLS})
    options = ["report", "--root", str(root)]
    for arguments, code, text in (
        ([*options, "--check"], 1, old),
        (options, 0, page("kernels", CELLS_TABLE)),
        ([*options, "--check"], 0, page("kernels", CELLS_TABLE)),
    ):
        with pytest.raises(SystemExit) as end:
            command_line.main(arguments)
        assert end.value.code == code
        assert (root / "docs/kernels.md").read_text() == text
    assert capsys.readouterr().err == "docs/kernels.md: table kernels differs.\n"


def test_a_table_without_lines_is_filled(tmp_path):
    empty = "<!-- table: kernels -->\n<!-- end -->\n"
    root = repository(tmp_path, {"README.md": empty}, {"kernels": CELLS})
    assert write_report(root, check=False) == []
    text = (root / "README.md").read_text()
    assert text == f"<!-- table: kernels -->\n{CELLS_TABLE}\n<!-- end -->\n"


NO_PARTNER = "docs/a.md: a marker of a table has no partner."
PAGE_OF_X = {"README.md": page("x", "")}
PROBLEMS = {  # pages, tables, and what is said of them
    "no results": ({"README.md": page("lost", "")}, {}, "README.md: table lost: "),
    "no page": ({}, {"unused": CELLS}, "docs/benchmarks/unused.jsonl: no page shows this table."),
    "no end": ({"docs/a.md": "<!-- table: lost -->\n"}, {}, NO_PARTNER),
    "no beginning": ({"docs/a.md": "<!-- end -->\n"}, {}, NO_PARTNER),
    "no end of the first": (
        {"docs/a.md": "<!-- table: x -->\nText.\n" + page("x", CELLS_TABLE)},
        {"x": CELLS},
        NO_PARTNER,
    ),
    "no description": (PAGE_OF_X, {"x": [{"kind": "speed"}]}, "must begin with one of"),
    "no column of speed": (
        PAGE_OF_X,
        {"x": [{"table": "speed", "columns": ["speed"]}, SPEED]},
        "table x: no result or column has the name 'speed'.",
    ),
    "no column of memory": (
        PAGE_OF_X,
        {"x": [{"table": "memory", "columns": ["peak"]}, SPEED | {"input_bytes": 1}]},
        "table x: no result or column has the name 'peak'.",
    ),
    "no column of losses": (
        PAGE_OF_X,
        {"x": [{"table": "losses", "columns": ["peak"]}, LOSS]},
        "table x: no result or column has the name 'peak'.",
    ),
    "no field": (
        PAGE_OF_X,
        {"x": [{"table": "memory"}, SPEED]},
        "table x: no result or column has the name 'input_bytes'.",
    ),
    "no rows": (PAGE_OF_X, {"x": CELLS[:1]}, "x.jsonl has no results."),
    "no such row": (
        {"README.md": page("x", "") + page("y", CELLS_TABLE)},
        {
            "x": [{"table": "cells", "rows_from": [{"name": "y", "where": {"shape": ["4k"]}}]}],
            "y": CELLS,
        },
        "table x: y.jsonl lacks a shape of ['4k'].",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("check", [False, True])
def test_what_does_not_fit_is_a_problem(tmp_path, name, check):
    pages, tables, problem = PROBLEMS[name]
    root = repository(tmp_path, pages, tables)
    before = pages_below(root)
    (sentence,) = write_report(root, check=check)
    assert problem in sentence
    assert before == pages_below(root)


def test_a_broken_line_is_named(tmp_path):
    root = repository(tmp_path, PAGE_OF_X, {"x": CELLS})
    path = root / FOLDER / "x.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    (sentence,) = write_report(root, check=True)
    assert "x.jsonl, line 4 is no JSON" in sentence


def test_rows_from_other_files_in_the_order_that_is_asked_for(tmp_path):
    slow = SPEED | {"implementation": "jax.nn", "seconds": 1.0, "seconds_min": 1.0}
    selection = {
        "name": "all",
        "where": {"implementation": ["jax.nn", "memeff"]},
        "set": {"device": "2 cores"},
    }
    columns = ["device", "implementation", "ms (least)"]
    few = {"table": "speed", "rows_from": [selection], "columns": columns}
    tables = {"all": [{"table": "speed"}, SPEED, slow], "few": [few]}
    root = repository(tmp_path, {}, tables)
    assert results_markdown(read_results(root / FOLDER, "few")).splitlines() == [
        "|  device | implementation |  ms (least) |",
        "| ------: | -------------: | ----------: |",
        "| 2 cores |         jax.nn | 1000 (1000) |",
        "| 2 cores |         memeff |   500 (250) |",
    ]


def test_flops_come_from_the_time_unless_they_are_stored(tmp_path):
    description = {"table": "speed", "columns": ["FLOP/s"]}
    stored = SPEED | {"flops_per_second": 7e9}
    root = repository(tmp_path, {}, {"x": [description, SPEED, stored]})
    lines = results_markdown(read_results(root / FOLDER, "x")).splitlines()
    operations = 4 * 8 * 1024**2 * 64
    assert lines[2:] == [f"| {operations / 0.5 / 1e9:.3g} G |", "|    7 G |"]


def test_save_replaces_the_results_of_a_table_by_one_command(tmp_path, capsys):
    description = {"table": "memory", "columns": ["tokens", "jax.nn", "causal forward: memeff"]}
    records = [description, {"old": 1}]
    root = repository(tmp_path, {"README.md": page("memory", "")}, {"memory": records})
    path = root / FOLDER / "memory.jsonl"
    arguments = "memory --length 64 128 --heads 2 --mode forward --implementation memeff jax.nn"
    command_line.main([*arguments.split(), "--save", str(path)])
    first, *rows = read_lines(path)
    assert first == description
    assert len(rows) == 4
    for row in rows:
        assert row["command"] == f"python -m memeff.bench {arguments}"
        assert {"date", "device", "python", "jax", "memeff"} <= set(row)
    printed = capsys.readouterr().out.strip().partition("\n\n")[2]
    assert memory_markdown(rows) == printed
    assert write_report(root, check=False) == []
    assert memory_markdown(rows, description["columns"]) in (root / "README.md").read_text()


def test_saved_times_are_rounded_and_lack_what_is_computed_from_them(tmp_path):
    path = tmp_path / "new.jsonl"
    sizes = "--length 64 --heads 2 --mode forward --mask full --rounds 1".split()
    names = ["memeff", "jax.nn"]
    command_line.main(["speed", *sizes, "--implementation", *names, "--save", str(path)])
    for row in read_lines(path)[1:]:
        assert not {"flops_per_second", "bytes_per_second"} & set(row)
        assert row["seconds"] == float(f"{row['seconds']:.6g}")


NOT_MEASURED = ("error", "temp_bytes", "peak_bytes", "note")


def rows_of_speed(seconds):
    case = Case(64, heads=2)
    for x in seconds:
        times = {"seconds": x, "seconds_min": x, "speed_against_jax_nn": 1 + x}
        rates = time_figures(case, [x], [])
        yield case_row("memeff", case) | rates | times | dict.fromkeys(NOT_MEASURED)


def rows_of_losses(seconds):
    for tokens, x in enumerate(seconds):
        times = {f"{mode}: seconds": x for mode in tables.TIMED_MODES}
        yield {"tokens": tokens, "features": 8, "implementation": "memeff"} | times


def rows_of_arguments(seconds):
    for row in rows_of_losses(seconds):
        yield row | {"B": 1, "T": row["tokens"], "N": 2, "H": 8, "extra": "plain"}


def rows_of_devices(seconds):
    sizes = {"devices": 2, "heads": 2, "kv_heads": 2, "head_dim": 8}
    for row, x in zip(rows_of_losses(seconds), seconds, strict=True):
        shares = {f"{mode}: share": x for mode in tables.TIMED_MODES}
        yield row | sizes | shares


@pytest.mark.parametrize(
    ("command", "module", "name", "rows", "first"),
    [
        ("speed", command_line, "speed_table", rows_of_speed, 1001),  # 4 digits
        ("losses", losses, "loss_rows", rows_of_losses, 101),
        ("arguments", arguments_bench, "argument_rows", rows_of_arguments, 101),
        ("devices", devices, "devices_rows", rows_of_devices, 101),
    ],
)
def test_the_printed_table_is_that_of_the_saved_rows(
    tmp_path, capsys, monkeypatch, command, module, name, rows, first
):
    """The times are just below the middle between two cells. Their 6 digits are the middle."""
    seconds = [(n + 0.49999999) * 1e-6 for n in range(first, first + 400, 2)]
    monkeypatch.setattr(module, name, lambda *_, **__: rows(seconds))
    command_line.main([command, "--save", str(tmp_path / "new.jsonl")])
    printed = capsys.readouterr().out.strip()
    assert printed.endswith("\n" + results_markdown(read_results(tmp_path, "new")))


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ({"table": "speed"}, "describes no table of {}: choose another file."),
        ({"table": "{}", "rows_from": []}, "takes its rows from other files: save to those."),
    ],
)
@pytest.mark.parametrize("command", ["memory", "hard", "losses", "arguments", "devices"])
def test_save_keeps_what_another_table_has(tmp_path, command, description, sentence):
    """It says so before anything is measured."""
    path = tmp_path / "x.jsonl"
    description = description | {"table": description["table"].format(command)}
    path.write_text(json.dumps(description) + "\n")
    with pytest.raises(SystemExit) as end:
        command_line.main([command, "--save", str(path)])
    assert sentence.format(command) in str(end.value.code)
    assert read_lines(path) == [description]
