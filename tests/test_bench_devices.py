"""The bench of a sequence on many devices, on CPU devices."""

import json

import jax
import pytest

from memeff.bench import devices
from memeff.bench.report import rewrite_page

SIZES = ["--tokens", "16", "--heads", "8", "--kv-heads", "4", "--head-dim", "8"]


@pytest.mark.slow
def test_all_ways_agree_and_fill_a_table(tmp_path):
    path = tmp_path / "small.jsonl"
    names = ["ring", "all_gather", "all_to_all", "two_axes", "jax.nn:all_gather", "nothing"]
    arguments = [*SIZES, "--dtype", "float32", "--rounds", "1", "--save", str(path)]
    devices.main([*arguments, "--implementation", *names])
    description, *rows = map(json.loads, path.read_text().splitlines())
    assert description == {"table": "devices"}
    assert [row["implementation"] for row in rows] == ["one", *names]
    for row in rows:
        assert row["devices"] == jax.device_count() == 8
        if row["implementation"] == "nothing":
            assert "nothing" in row["note"]
            continue
        assert row["error"] < 2e-6
        for mode in ("forward", "forward + gradient"):
            assert row[f"{mode}: temp_bytes"] > 0
            share = row.get(f"{mode}: share")
            assert share is None if row["implementation"] == "one" else share > 0
    page = rewrite_page("<!-- table: small -->\n<!-- end -->", tmp_path)
    assert page.problems == []
    assert "8:4 of 8" in page.text
    plot = tmp_path / "small.svg"
    devices.main(["--results", str(path), "--plot", str(plot)])
    assert b"<svg" in plot.read_bytes()
