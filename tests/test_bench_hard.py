"""Test the table of hard cases: its cells, its rows, and the arrays that a case makes."""

import json

import numpy as np
import pytest

from memeff.bench import hard, hard_inputs, hard_paths, tables
from memeff.bench.report import rewrite_page


def errors_of(error, plain, rounding=0.5, largest=1.0, saved=None):
    """Return the errors of one array, as `hard.array_errors` has them."""
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
        (errors_of(3.0, 2.0), "1.50"),
        (errors_of(3.2, 2.0), "**1.6**"),
        (errors_of(3.2, 2.0, saved=3.2), "**1.6** (1)"),
        (errors_of(0.0, 0.0), "0"),
        (errors_of(0.25, 0.0), "0.5 ulp"),
        (errors_of(2.0, 0.0), "**4 ulp**"),
        (errors_of(None, 1.0), "**not finite**"),
        (errors_of(None, None), "not finite, as plain"),
        (errors_of(1.0, None), "plain: not finite"),
        (errors_of(1.0, 1.0, largest=None), "-"),
    ],
)
def test_cells(errors, text):
    assert tables.hard_cell(errors) == text


def test_errors_know_what_a_dtype_holds():
    truth = np.full((2, 3), 1e5)
    float16 = hard.array_errors(truth, truth, truth, truth, "float16")
    assert float16["largest"] is None  # float16 holds at most 65,504
    bfloat16 = hard.array_errors(truth, truth, truth, truth, "bfloat16")
    assert bfloat16 == errors_of(0.0, 0.0, 2.0**-7 * 1e5, 1e5, 0.0)
    infinite = np.full((2, 3), np.inf)
    not_finite = hard.array_errors(infinite, truth, truth, truth, "bfloat16")
    assert not_finite["error"] is None


def test_rows_and_their_report(tmp_path, capsys, monkeypatch):
    def few_keys(rng):
        return hard_inputs.normal(rng, T=5, S=7, dlse=1.0)

    name = "few keys"
    monkeypatch.setitem(hard_inputs.CASES, name, hard_inputs.HardCase(few_keys, ("bfloat16",)))
    results = tmp_path / "few.jsonl"
    hard.main(["--only", name, "--save", str(results)])
    description, *rows = map(json.loads, results.read_text().splitlines())
    assert description == {"table": "hard"}
    assert {row["path"] for row in rows} == {hard_paths.CHUNKED, hard_paths.AS_ON_A_GPU}
    for row in rows:
        assert row["command"] == "python -m memeff.bench hard --only 'few keys'"
        for array in hard_paths.HardResults._fields:
            errors = row[array]
            assert 0 < errors["error"] <= 2 * errors["plain"] + errors["rounding"]
    page = rewrite_page("<!-- table: few -->\n<!-- end -->", tmp_path)
    assert page.text.splitlines()[1:-1] == capsys.readouterr().out.splitlines()[len(rows) :]


def test_a_sink_key_has_the_largest_logit_by_what_the_case_says():
    case = hard_inputs.CASES["16k keys 18.5 nats below a sink key"]
    query, key, *_ = case.make(np.random.default_rng(0))
    s = query @ key.T * query.shape[1] ** -0.5
    lengths = np.linalg.norm(key, axis=1)
    assert lengths[-1] > 10 * lengths[1:-1].max()
    assert np.abs(s[:, 1:]).max() < 1
    np.testing.assert_allclose(s[:, 0], 18.5)


def test_the_truth_sums_blocks_of_queries():
    arrays = hard_inputs.normal(np.random.default_rng(0), T=5000, S=3, dlse=1.0)
    doubled = arrays._replace(
        query=np.concatenate([arrays.query, arrays.query]),
        dout=np.concatenate([arrays.dout, arrays.dout]),
        dlse=np.concatenate([arrays.dlse, arrays.dlse]),
    )
    twice = hard_paths.exact(doubled)
    once = hard_paths.exact(arrays)
    for name, x, y in zip(once._fields, twice, once, strict=True):
        expected = 2 * y if name in ("dk", "dv") else np.concatenate([y, y])
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
