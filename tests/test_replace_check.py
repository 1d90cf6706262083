"""`memeff.replace_attention(check=True)`: what it allows as rounding, and what it finds."""

import jax
import jax.numpy as jnp
import pytest
from attention_programs import Program, make_arrays
from conftest import few
from replaced_checks import FOUND, plain, qkv, qkv_of_one_head, replace, spelled

import memeff
from memeff.rewrite import assignment, check


def test_check_refuses_traced_arrays():
    with pytest.raises(TypeError, match="check=True compares numbers"):
        jax.jit(replace(plain, check=True))(*qkv())


# Spellings with rows that see no key, score functions, dropout-free factors, and bodies of loops.
CHECKED = (
    Program(mask="constant", bias="alibi", cap="tanh", softmax="exp2", nesting="remat"),
    Program(mask="empty_row", hiding="added", softmax="sink", nesting="scan_mask"),
)


@pytest.mark.parametrize("program", few((*CHECKED, *FOUND), CHECKED), ids=spelled)
def test_check(program):
    replace(program, check=True)(make_arrays())


def test_check_allows_the_rounding_of_a_program_with_two_dtypes():
    """The product of float32 is rounded before float64 is added; memeff does not round it."""

    def attend(q, k, v, bias):
        return jax.nn.softmax(q @ k.T + bias) @ v

    def in_float32(q, k, v, bias):
        s = (q @ k.T).astype(jnp.float64) + bias
        return jax.nn.softmax(s.astype(jnp.float32)).astype(v.dtype) @ v

    with jax.enable_x64(True):
        arrays = qkv_of_one_head()
        for f, dtype in ((attend, "float32"), (in_float32, "float64")):
            q, k, v = (x.astype(dtype) for x in arrays)
            replace(f, check=True, strict=True)(q, k, v, jnp.zeros((16, 16)))


def test_check_allows_the_rounding_of_large_logits():
    q, k, v = qkv(48)
    replace(plain, check=True, strict=True)(3e6 * q, k, v)


def test_check_finds_a_mask_that_was_read_wrongly(monkeypatch):
    right = assignment._window

    def window(low, high):
        q_offset, (left, _) = right(low, high)
        return q_offset, (left, 1)

    monkeypatch.setattr(assignment, "_window", window)
    place = r"attention at .*replaced_checks.py:\d+ differs from the original by"
    with pytest.raises(AssertionError, match=f"check=True: the {place}.* in batch entry 0, query"):
        replace(plain, check=True)(*qkv())


def test_check_finds_a_call_that_is_computed_wrongly(monkeypatch):
    def wrong(implementation, query, key, value, **kwargs):
        def attend(*arrays, **options):
            return 1.01 * memeff.dot_product_attention(*arrays, **options)

        return memeff.audit(attend, query, key, value, **kwargs)

    monkeypatch.setattr(check, "audit", wrong)
    with pytest.raises(AssertionError, match=r"\.py:\d+ is computed with an error beyond rounding"):
        replace(plain, check=True)(*qkv())


@pytest.mark.slow
def test_check_takes_no_array_of_all_pairs():
    """Logits of 32,768 tokens would take 8 GiB."""
    q, k, v = qkv(32768)
    memeff.replace_attention(plain, check=True)(q, k, v)
