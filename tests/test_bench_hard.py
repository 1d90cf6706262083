"""The table of hard cases: what its cells say, and that each case makes the arrays that its name promises."""

import json

import numpy as np
import pytest

from memeff import bench_hard


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
    assert bench_hard.cell(errors) == text


def test_errors_know_what_a_dtype_holds():
    truth = np.full((2, 3), 1e5)
    # at most 65,504
    assert bench_hard._errors(truth, truth, truth, truth, "float16")["largest"] is None
    assert bench_hard._errors(truth, truth, truth, truth, "bfloat16") == of(
        0.0, 0.0, 2.0**-7 * 1e5, 1e5, 0.0
    )
    assert (
        bench_hard._errors(np.full((2, 3), np.inf), truth, truth, truth, "bfloat16")["error"]
        is None
    )


def test_rows_and_their_report(tmp_path, capsys, monkeypatch):
    name = "few keys"
    few = bench_hard.Case(lambda rng: bench_hard._normal(rng, T=5, S=7, dlse=1.0), ("bfloat16",))
    monkeypatch.setitem(bench_hard.CASES, name, few)
    bench_hard.main(
        ["--only", name, "--json", str(tmp_path / "rows")], lambda: {"device": "here", "jax": "1"}
    )
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["path"] for row in rows} == {bench_hard.CHUNKED, bench_hard.AS_ON_A_GPU}
    for row in rows:
        for array in bench_hard.ARRAYS:
            assert 0 < row[array]["error"] <= 2 * row[array]["plain"] + row[array]["rounding"]
    bench_hard.main(["--report", str(tmp_path / "rows"), str(tmp_path / "page")], dict)
    assert capsys.readouterr().out.strip() in (tmp_path / "page").read_text()


def test_a_sink_key_has_the_largest_logit_by_what_the_case_says():
    query, key, *_ = bench_hard.CASES["16k keys 18.5 nats below a sink key"].make(
        np.random.default_rng(0)
    )
    s = query @ key.T * query.shape[1] ** -0.5
    assert (np.linalg.norm(key[-1]) > 10 * np.linalg.norm(key[1:-1], axis=1).max()) and np.abs(
        s[:, 1:]
    ).max() < 1
    np.testing.assert_allclose(s[:, 0], 18.5)


def test_the_truth_sums_blocks_of_queries():
    arrays = bench_hard._normal(np.random.default_rng(0), T=5000, S=3, dlse=1.0)
    whole = bench_hard.exact(
        *(np.concatenate([x, x]) if n in (0, 3, 4) else x for n, x in enumerate(arrays))
    )
    once = bench_hard.exact(*arrays)
    for name, x, y in zip(bench_hard.ARRAYS, whole, once, strict=True):
        expected = 2 * y if name in ("dk", "dv") else np.concatenate([y, y])
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
