"""`python -m memeff.bench arguments` on small calls of every argument."""

import json
import re

import pytest

from memeff.bench import arguments
from memeff.bench.tables import TIMED_MODES


@pytest.mark.parametrize("name", ["torch", "memeff:gpu", "jax.nn:cuda"])
def test_a_misspelt_name_is_not_measured_as_another(name):
    (case, *_) = arguments.CASES.values()
    (row, *_) = arguments.argument_rows([case._replace(T=16)], [name], 1, 1)
    assert f"implementation '{name}' is not known: use one of memeff" in row["note"]


@pytest.mark.slow
def test_every_argument_is_timed_and_saved(monkeypatch, tmp_path, capsys):
    cases = {extra: arguments.ArgumentCase(1, 16, 2, 8, extra) for extra in arguments.EXTRAS}
    monkeypatch.setattr(arguments, "CASES", cases)
    monkeypatch.setattr(arguments, "SECONDS_PER_SAMPLE", 0.0)
    path = tmp_path / "arguments.jsonl"
    names = ["memeff", "jax.nn", "jax.nn:cudnn"]
    arguments.main(["--implementation", *names, "--rounds", "1", "--save", str(path)])
    description, *rows = map(json.loads, path.read_text().splitlines())
    assert description == {"table": "arguments"}
    for extra in cases:
        by_name = {row["implementation"]: row for row in rows if row["extra"] == extra}
        assert all(by_name["memeff"][f"{mode}: seconds"] > 0 for mode in TIMED_MODES)
        has_jax_nn = extra in ("plain", "bias", "mask")  # which lacks the others
        assert set(by_name) == set(names if has_jax_nn else names[:1])
    assert "cuDNN" in rows[2]["note"]  # on a CPU
    printed = capsys.readouterr().out
    assert (
        "| B, T, N, H | with | memeff, ms | jax.nn, ms | jax.nn:cudnn, ms | temporary MB |"
        in printed
    )
    assert re.search(
        r"\| 1, 16, 2, 8 \| plain \| \S+ / \S+ \| \S+ / \S+ \| fails \| 0, 0, - \|", printed
    )
