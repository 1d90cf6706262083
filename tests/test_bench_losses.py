"""The bench of the loss of a large vocabulary, at small sizes."""

import json

import numpy as np
import pytest

from memeff.bench import losses, tables
from memeff.bench.report import rewrite_page

SIZES = ["--tokens", "256", "512", "--features", "16", "--words", "640", "--dtype", "float32"]


@pytest.mark.slow
def test_losses_agree_and_fill_a_table(tmp_path, capsys):
    path = tmp_path / "small.jsonl"
    names = ["memeff", "memeff:mean", "memeff:chunked", "nothing"]
    losses.main([*SIZES, "--implementation", *names, "--rounds", "1", "--save", str(path)])
    description, *rows = map(json.loads, path.read_text().splitlines())
    assert description == {"table": "losses"}
    assert [row["implementation"] for row in rows] == 2 * names
    by_name = {row["implementation"]: row for row in rows[:4]}
    loss = by_name["memeff"]["forward: loss"]
    assert abs(loss - np.log(640) - 2) < 0.5  # logits of size 2 add half of 4
    for name in names[:3]:
        row = by_name[name]
        np.testing.assert_allclose(row["forward + gradient: loss"], loss, rtol=2e-6)
        assert row["forward + gradient: seconds"] > 0
        assert row["forward + gradient: temp_bytes"] > 0
    assert "forward: seconds" not in by_name["memeff:mean"]
    assert "'nothing' is not known" in by_name["nothing"]["note"]
    page = rewrite_page("<!-- table: small -->\n<!-- end -->", tmp_path)
    assert page.problems == []
    header, _, first, *_ = page.text.splitlines()[1:]
    assert [cell.strip() for cell in header.split("|")[1:-1]] == [
        "H",
        "implementation",
        "256: ms",
        "256: memory",
        "512: ms",
        "512: memory",
    ]
    assert "memeff" in first
    assert page.text.split("\n", 1)[1].rsplit("\n", 1)[0] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["memeff:men", "optax:8", "tokamax:xla", "jla:mean"])
def test_a_misspelt_variant_is_not_measured_as_another(name):
    """It ran as the library's default, and the table had its figures under the wrong name."""
    case = losses.LossCase(64, 64, 16, "float32")
    with pytest.raises(
        ValueError, match=f"implementation '{name}' is not known: use one of memeff"
    ):
        losses.compiled(name, case, "forward")


def test_calls_that_do_not_fit_are_not_compiled(monkeypatch):
    monkeypatch.setattr(losses, "device_bytes", lambda: 2.0**20)
    case = losses.LossCase(1024, 1024, 16, "float32")
    (row,) = losses.loss_rows([case], ["optax"], 1, 1)
    assert row["note"] == "out of memory"
    assert tables.times(row) == "out of memory"
