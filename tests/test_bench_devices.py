"""The bench of a sequence on many devices, on CPU devices."""

import json

import jax
import pytest

from memeff.bench import devices
from memeff.bench.plots import devices_figure
from memeff.bench.report import rewrite_page

SIZES = ["--tokens", "16", "--heads", "8", "--kv-heads", "4", "--head-dim", "8"]


def test_more_devices_than_there_are_end_in_a_sentence():
    with pytest.raises(SystemExit, match="--devices 9: this machine has 8. Give fewer"):
        devices.main(["--devices", "9"])


@pytest.mark.slow
def test_all_ways_agree_and_fill_a_table(tmp_path):
    path = tmp_path / "small.jsonl"
    names = ["ring", "all_gather", "all_to_all", "two_axes", "jax.nn:all_gather", "nothing"]
    arguments = [*SIZES, "--dtype", "float32", "--rounds", "1", "--save", str(path)]
    devices.main([*arguments, "--implementation", *names])
    description, *rows = map(json.loads, path.read_text().splitlines())
    assert description == {"table": "devices"}
    assert [row["implementation"] for row in rows] == ["one", "own", *names]
    for row in rows:
        assert row["devices"] == jax.device_count() == 8
        if row["implementation"] == "nothing":
            assert "nothing" in row["note"]
            continue
        alone = row["implementation"] in ("one", "own")
        assert alone or row["error"] < 2e-6
        for mode in ("forward", "forward + gradient"):
            assert row[f"{mode}: temp_bytes"] > 0
            for field in ("share", "share of own"):
                share = row.get(f"{mode}: {field}")
                assert share is None if alone else share > 0
    page = rewrite_page("<!-- table: small -->\n<!-- end -->", tmp_path)
    assert page.problems == []
    assert "8:4 of 8" in page.text
    plot = tmp_path / "small.svg"
    devices.main(["--results", str(path), "--plot", str(plot)])
    assert b"<svg" in plot.read_bytes()


def test_a_call_has_one_colour_in_all_panels():
    def row(name, tokens):
        return dict(implementation=name, devices=2, tokens=tokens, heads=2, kv_heads=1) | {
            f"{mode}: share": 0.5 for mode in ("forward", "forward + gradient")
        }

    rows = [row("ring", 8), row("jla:ring", 8), row("jla:ring", 32), row("ring", 32)]
    panels = devices_figure(rows).axes
    assert len(panels) == 4
    colours = [{line.get_label(): line.get_color() for line in panel.lines} for panel in panels]
    assert all(found == colours[0] for found in colours)
    assert len(set(colours[0].values())) == len(colours[0]) == 2
    assert panels[1].get_legend() is not None
