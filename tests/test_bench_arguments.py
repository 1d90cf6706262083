"""`python -m memeff.bench arguments` on small calls of every argument."""

import json

import pytest

from memeff.bench import arguments


@pytest.mark.slow
def test_every_argument_is_timed_and_saved(monkeypatch, tmp_path, capsys):
    cases = {extra: arguments.ArgumentCase(1, 16, 2, 8, extra) for extra in arguments.EXTRAS}
    monkeypatch.setattr(arguments, "CASES", cases)
    monkeypatch.setattr(arguments, "SECONDS_PER_SAMPLE", 0.0)
    path = tmp_path / "arguments.jsonl"
    names = ["memeff", "jax.nn", "jax.nn:cudnn"]
    arguments.main(["--implementation", *names, "--rounds", "1", "--save", str(path)])
    description, *lines = map(json.loads, path.read_text().splitlines())
    assert description["table"] == "cells"
    assert [line["with"] for line in lines] == list(cases)
    for line in lines:
        assert " / " in line["memeff, ms"]
        has_jax_nn = line["with"] in ("plain", "bias", "mask")  # which lacks the others
        assert ("jax.nn, ms" in line) == has_jax_nn
    assert lines[0]["jax.nn:cudnn, ms"] == "fails"  # on a CPU
    assert "cuDNN" in capsys.readouterr().out
