"""Test the bench's errors against float64, and `--doctor`, which judges implementations by them."""

import functools
import re

import jax
import numpy as np
import oracle
import pytest

import memeff.bench.__main__ as command_line
from memeff import bench
from memeff.bench import calls, doctor, implementations, options, truth
from memeff.bench.cases import input_arrays

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}


def test_error_is_against_the_formula_of_the_last_head():
    case = bench.Case(40, **SIZES, mode="gradient")
    right = calls.prepare("memeff", case).result()
    assert truth.error_of(right, case) < 1e-5
    for position in (0, 1):  # out, dq
        wrong = list(right)
        wrong[position] = 1.01 * wrong[position]
        assert truth.error_of(tuple(wrong), case) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("mode", ["jvp", "hvp"])
def test_error_of_derivatives(mode):
    case = bench.Case(40, **SIZES, mode=mode)
    right = calls.prepare("memeff", case).result()
    assert truth.error_of(right, case) < 1e-5
    wrong = jax.tree.map(lambda x: 1.01 * x, (right[0], right[1]))
    assert truth.error_of(wrong, case) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.once
def test_doctor_says_pass_fail_and_cannot_run(capsys, monkeypatch):
    """Attention that forgets the scale fails, and memeff and plain attention pass.

    An implementation that is not installed cannot run.
    """
    attention = implementations.attention
    forgetful = functools.partial(attention("jax.nn"), scale=1.0)

    def attention_or_forgetful(name):
        return forgetful if name == "other" else attention(name)

    for module in (calls, implementations):
        monkeypatch.setattr(module, "attention", attention_or_forgetful)
    verdicts = {
        "memeff": "pass",
        "memeff:128": "pass",
        "jax.nn": "pass",
        "other": "fail",
        "jax.nn:cudnn": "cannot run",
    }
    rows = doctor.check_implementations(tuple(verdicts), doctor.CASES[1:2])
    assert [row["verdict"] for row in rows] == [*verdicts.values()], rows
    text = doctor.doctor_markdown(rows)
    assert re.search(r"memeff:128 \| +pass \(\de-0\d\) \|", text)
    assert "cannot run: cuDNN needs an NVIDIA GPU" in text

    def rows_of(names):
        return [row for row in rows if row["implementation"] in names]

    monkeypatch.setattr(doctor, "check_implementations", rows_of)
    monkeypatch.setattr(options, "why_not", lambda *_: None)
    for names, code in ((["memeff", "jax.nn:cudnn"], 0), (["memeff", "other"], 1)):
        with pytest.raises(SystemExit) as end:
            command_line.main(["--doctor", "--implementation", *names])
        assert end.value.code == code
    assert "against float64" in capsys.readouterr().out


def test_doctor_s_truth_is_the_oracle_s():
    case = bench.Case(37, **SIZES, mode="gradient")
    arrays = input_arrays(case)
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    out, lse = oracle.attention(q, k, v, is_causal=True)
    dlse = np.random.default_rng(0).standard_normal(lse.shape)
    gradients = oracle.gradients(q, k, v, is_causal=True, dout=dout, dlse=dlse)
    actual = truth.exact_attention((*arrays, dlse[..., None]), case, np.arange(37))
    np.testing.assert_allclose(actual.lse[..., 0], lse, atol=1e-12)
    np.testing.assert_allclose(actual.out, out, atol=1e-12)
    np.testing.assert_allclose(actual.dq, gradients["query"], atol=1e-12)
    np.testing.assert_allclose(actual.dk, gradients["key"], atol=1e-12)
    np.testing.assert_allclose(actual.dv, gradients["value"], atol=1e-12)
    gradients = oracle.gradients(q, k, v, is_causal=True, dout=dout, dlse=0 * dlse)
    along = 0.0  # the derivative of <out, dout> along query, key and value themselves
    for name, direction in (("query", q), ("key", k), ("value", v)):
        along += (gradients[name] * direction).sum()
    np.testing.assert_allclose((actual.tangent * dout).sum(), along, rtol=1e-12)
