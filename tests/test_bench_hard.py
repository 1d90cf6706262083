"""The table of hard cases: what its cells say, and that each case makes the arrays that its name promises."""

import json

import numpy as np
import pytest

from memeff.bench import hard, hard_inputs, hard_paths


def of(error, plain, rounding=0.5, largest=1.0, saved=None):
    return {
        "error": error,
        "plain": plain,
        "saved": saved,
        "rounding": rounding,
        "largest": largest,
    }


@pytest.mark.parametrize(
    "errors, text",
    [
        (of(3.0, 2.0), "1.50"),
        (of(3.2, 2.0), "**1.6**"),
        (of(3.2, 2.0, saved=3.2), "**1.6** (1)"),
        (of(0.0, 0.0), "0"),
        (of(0.25, 0.0), "0.5 ulp"),
        (of(2.0, 0.0), "**4 ulp**"),
        (of(None, 1.0), "**not finite**"),
        (of(None, None), "not finite, as plain"),
        (of(1.0, None), "plain: not finite"),
        (of(1.0, 1.0, largest=None), "-"),
    ],
)
def test_cells(errors, text):
    assert hard.cell(errors) == text


def test_errors_know_what_a_dtype_holds():
    truth = np.full((2, 3), 1e5)
    # at most 65,504
    assert hard.array_errors(truth, truth, truth, truth, "float16")["largest"] is None
    assert hard.array_errors(truth, truth, truth, truth, "bfloat16") == of(
        0.0, 0.0, 2.0**-7 * 1e5, 1e5, 0.0
    )
    assert (
        hard.array_errors(np.full((2, 3), np.inf), truth, truth, truth, "bfloat16")["error"] is None
    )


def test_rows_and_their_report(tmp_path, capsys, monkeypatch):
    name = "few keys"
    few = hard_inputs.HardCase(
        lambda rng: hard_inputs.normal(rng, T=5, S=7, dlse=1.0), ("bfloat16",)
    )
    monkeypatch.setitem(hard_inputs.CASES, name, few)
    monkeypatch.setattr(hard, "machine", lambda: {"device": "here", "jax": "1"})
    hard.main(["--only", name, "--json", str(tmp_path / "rows")])
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["path"] for row in rows} == {hard_paths.CHUNKED, hard_paths.AS_ON_A_GPU}
    for row in rows:
        for array in hard.ARRAYS:
            assert 0 < row[array]["error"] <= 2 * row[array]["plain"] + row[array]["rounding"]
    hard.main(["--report", str(tmp_path / "rows"), str(tmp_path / "page")])
    assert capsys.readouterr().out.strip() in (tmp_path / "page").read_text()


def test_a_sink_key_has_the_largest_logit_by_what_the_case_says():
    query, key, *_ = hard_inputs.CASES["16k keys 18.5 nats below a sink key"].make(
        np.random.default_rng(0)
    )
    s = query @ key.T * query.shape[1] ** -0.5
    assert (np.linalg.norm(key[-1]) > 10 * np.linalg.norm(key[1:-1], axis=1).max()) and np.abs(
        s[:, 1:]
    ).max() < 1
    np.testing.assert_allclose(s[:, 0], 18.5)


def test_the_truth_sums_blocks_of_queries():
    arrays = hard_inputs.normal(np.random.default_rng(0), T=5000, S=3, dlse=1.0)
    twice = {
        name: np.concatenate([x, x])
        for name, x in arrays._asdict().items()
        if name in ("query", "dout", "dlse")
    }
    whole = hard_paths.exact(arrays._replace(**twice))
    once = hard_paths.exact(arrays)
    for name, x, y in zip(hard.ARRAYS, whole, once, strict=True):
        expected = 2 * y if name in ("dk", "dv") else np.concatenate([y, y])
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
