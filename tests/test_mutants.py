"""Tests of the tests: planted bugs, each of which a few of the fast tests must catch.

A mutant is a copy of memeff in which one piece of text is another. It is measured by what `test_numbers.test_float32` does
(the law of tolerance against the oracle) on named cases, or by fast tests named by their node id.
"""

import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent

NUMBERS = """
import sys
sys.path[:0] = [".", "tests"]
from conftest import assert_case, run_cases
for dtype, name in (word.split(":") for word in sys.argv[1:]):
    assert_case(run_cases((name,), dtype)[name], name, dtype)
"""

TILE, XLA, PROBLEM, RULES, ARGUMENTS = "tile.py", "xla.py", "problem.py", "differentiation.py", "arguments.py"

ORDERS = "tests/test_orders.py::test_tangent_is_the_transpose_of_the_oracles_gradient"
SECOND = "'tests/test_orders.py::test_second_order_against_the_definition[forward_over_reverse-bias_full]'"
FUNCTIONS = "tests/test_functions.py::test_"
SINKS = "tests/test_sinks.py"
LINEARIZE = "'tests/test_transforms.py::test_forward_mode_and_second_order[linearize]'"

MUTANTS = {
    "tangent without its row": ("tangent.py", "(n - r[..., None] * out", "(n - 0 * r[..., None] * out", LINEARIZE),
    "tangent of the same walk without its row": (
        "tangent.py",
        "(n - r[..., None] * o)",
        "(n - 0 * r[..., None] * o)",
        f"{ORDERS}[scale_array]",
    ),
    "tangent of the same walk not rescaled": (
        "tangent.py",
        "a[..., None] * n + n_more",
        "n + n_more",
        f"{ORDERS}[scale_array]",
    ),
    "lse's tangent of the same walk not rescaled": ("tangent.py", "a * r + r_more", "r + r_more", f"{ORDERS}[scale_array]"),
    "tangent of values lost": ("tangent.py", "if along.value is not None:", "if False:", f"{ORDERS}[scale_array]"),
    "tangent of keys lost": ("tangent.py", "((dq, k), (q, dk))", "((dq, k), (q, None))", f"{ORDERS}[scale_array]"),
    "a transpose added to the wrong tile": (
        "tiles.py",
        "cuts[at][0] if at in cuts",
        "0 * cuts[at][0] if at in cuts",
        SECOND,
    ),
    "tangents along the first input only": (
        "tiles.py",
        "moving = tuple(n for n, x in enumerate(tangents) if type(x) is not ad.Zero)",
        "moving = tuple(n for n, x in enumerate(tangents) if type(x) is not ad.Zero)[:1]",
        SECOND,
    ),
    "a block that some may see is hidden": (
        "blocks.py",
        "> 0, count(self.every)",
        "> 1, count(self.every)",
        f"{FUNCTIONS}block_mask_skips_the_tiles_that_its_picture_hides",
    ),
    "score before the soft cap": (
        PROBLEM,
        "    if problem.score_fn is not None:\n        assert at is not None\n        s = problem.score_fn(s, at",
        "    if problem.score_fn is not None:\n        assert at is not None\n        s = problem.score_fn(0.9 * s, at",
        f"'{FUNCTIONS}functions_beside_every_feature[soft_cap]'",
    ),
    "keys are not turned back": (
        TILE,
        "dq, dk, more = pull((dq, dk.swapaxes(2, 3)))",
        "_, _, more = pull((dq, dk.swapaxes(2, 3)))\n    dk = dk.swapaxes(2, 3)",
        f"'{FUNCTIONS}functions_beside_every_feature[causal]'",
    ),
    "entropy not moved with the maximum": (XLA, "(e_old + fall * l_old)", "e_old", f"{FUNCTIONS}statistics_and_key_mass"),
    # name: file, text, what stands there instead, what must catch it
    "scale dropped": (PROBLEM, "s = raw * scale if", "s = raw if", "float32:plain"),
    "scale array ignored": (PROBLEM, "problem.scale if terms.scale is None", "problem.scale if True", "float32:scale_array"),
    "soft cap dropped": (PROBLEM, "cap * jnp.tanh(raw * (scale / cap))", "raw * scale + 0 * cap", "float32:soft_cap"),
    "soft cap derivative dropped": (
        PROBLEM,
        "cap * jnp.tanh(raw * (scale / cap))",
        "raw * scale + jax.lax.stop_gradient(cap * jnp.tanh(raw * (scale / cap)) - raw * scale)",
        "float32:soft_cap",
    ),
    "bias before the soft cap": (
        PROBLEM,
        "    s = raw * scale if cap",
        "    raw = raw if terms.bias is None else raw + terms.bias.astype(raw.dtype) / scale\n"
        "    terms = terms._replace(bias=None)\n"
        "    s = raw * scale if cap",
        "float32:everything",
    ),
    "window off by one to the left": (PROBLEM, "at - problem.left <= cols", "at - problem.left < cols", "float32:window"),
    "window off by one to the right": (PROBLEM, "cols <= at + problem.right", "cols < at + problem.right", "float32:causal"),
    "offset ignored": (PROBLEM, "(problem.q_offset if q_offset is None", "(0 if q_offset is None", "float32:q_offset"),
    "offset array ignored": (PROBLEM, "is None else q_offset)", "is None else 0)", "float32:q_offset_array"),
    "key length off by one": (
        PROBLEM,
        "cols < sight.kv_lengths",
        "cols <= sight.kv_lengths",
        "float32:key_lengths",
    ),
    "segments ignored": (PROBLEM, "if sight.q_segments is not None and", "if False and", "float32:segments"),
    "mask ignored": (PROBLEM, "        keep &= sight.mask\n", "        pass\n", "float32:mask_dense"),
    "tail visible": (PROBLEM, "keep = (rows >= 0) & (cols >= 0)", "keep = (rows >= -1) & (cols >= -1)", "float32:plain"),
    "lowest finite bias does not hide": (
        PROBLEM,
        "~(sight.bias <= jnp.finfo(sight.bias.dtype).min)",
        "~(sight.bias == -jnp.inf)",
        "tests/test_masks.py::test_rows_that_see_nothing",
    ),
    "counters of dropout": (PROBLEM, "_multiply_add(low, S, cols", "_multiply_add(low, T, cols", "float32:dropout"),
    "heads of a block numbered from 0": (
        TILE,
        "tile.of[0], tile.first)",
        "tile.of[0])",
        "tests/test_numbers.py::test_in_blocks[dropout_each]",
    ),
    "dropout not scaled": (TILE, "x / (1.0 - problem.dropout.rate)", "x", "float32:dropout_each"),
    "dropout not in dp": (
        XLA,
        "dp = drop(problem, tile, lax.optimization_barrier(dp))",
        "dp = lax.optimization_barrier(dp)",
        "float32:dropout_each",
    ),
    "maximum not rescaled": (XLA, "a = jnp.exp(m_old - shift)", "a = jnp.ones_like(m_old)", "float32:plain"),
    "maximum of the wrong end": (
        TILE,
        "tile.here.terms.scale is not None or problem.scale < 0 or",
        "tile.here.terms.scale is not None or",
        "tests/test_numbers.py::test_negative_scale_of_large_logits",
    ),
    "sign of lse": (PROBLEM, "high = m + jnp.log(l)", "high = m - jnp.log(l)", "float32:plain"),
    "lse in bfloat16": (
        PROBLEM,
        "high = m + jnp.log(l)",
        "high = (m + jnp.log(l)).astype(jnp.bfloat16).astype(l.dtype)",
        "float32:plain",
    ),
    "delta forgotten": (XLA, "pull(p * (dp - delta[..., None]))", "pull(p * dp)", "float32:plain"),
    "dlse ignored": (XLA, "delta = delta if dlse is None else delta - dlse", "pass", "float32:plain"),
    "sign of dlse": (XLA, "else delta - dlse", "else delta + dlse", "float32:plain"),
    "dk and dv swapped": (
        XLA,
        "key.transpose(0, 3, 1, 2), value.transpose(0, 3, 1, 2), terms)",
        "value.transpose(0, 3, 1, 2), key.transpose(0, 3, 1, 2), terms)",
        "float32:one_of_each",  # where H = D, or shapes would tell
    ),
    "sum over the group omitted": (
        XLA,
        'dk = dot("bkgth,bkgtc->bkhc", finite(q, masked), draw,',
        'dk = dot("bkgth,bkgtc->bkhc", finite(q, masked)[:, :, :1], draw[:, :, :1],',
        "float32:plain",
    ),
    "a row's reference of another tile": (
        XLA,
        "start = aside(fetch, here[0])\n",
        "start = aside(fetch, here[-1])\n",
        "tests/test_fixed_reference.py::test_fixed_reference_is_exact[True-float32]",
    ),
    "rows that do not stand are kept": (
        XLA,
        "(rows.l >= lost) & (rows.l < 2.0**125) & kept & (o < jnp.inf)",
        "rows.l > -1.0",
        "tests/test_fixed_reference.py::test_fixed_reference_is_exact[True-float32]",
    ),
    "values that are not finite are not looked for": (
        XLA,
        "_stands(problem, operands, rows) & ~_sees_bad_value(problem, operands)",
        "_stands(problem, operands, rows)",
        "tests/test_masks.py::test_nan_reaches_exactly_the_rows_that_see_it",
    ),
    "float16 unchecked": (
        XLA,
        "lax.cond(_everywhere(halves.serve), ",
        "lax.cond(True, ",
        "tests/test_halves.py::test_what_float16_cannot_hold_goes_the_general_way",
    ),
    "float16 not scaled back": (
        XLA,
        "/ (column * Halves.P)[..., None]",
        "/ Halves.P",
        "'tests/test_halves.py::test_fused_is_as_good[causal joined-bfloat16]'",
    ),
    "delta forgotten in an epilogue": (
        XLA,
        "pull((dp - delta[..., None]) * up)",
        "pull(dp * up)",
        "tests/test_halves.py::test_fused_is_as_good[full-float32]",
    ),
    "probabilities of the same tile again": (
        XLA,
        "tile = known(fetch_ahead, following, then)",
        "tile = known(fetch_ahead, here, then)",
        "tests/test_halves.py::test_fused_is_as_good[full-float32]",
    ),
    "a block in the place of another": (
        XLA,
        "starts = [first[0], *[0] * (heads - 1), first[1]]",
        "starts = [0] * (heads + 1)",
        "tests/test_halves.py::test_block_by_block",
    ),
    "a joined tile left out": (
        XLA,
        "left &= ~taken.repeat",
        "left &= taken.repeat",
        "tests/test_halves.py::test_joined_tiles_cover_what_tiles_cover_once",
    ),
    "rows that stand are done again": (
        XLA,
        "        if stands is not None:\n",
        "        if False:\n",
        "tests/test_fixed_reference.py::test_rows_that_stand_stay",
    ),
    "last key tile skipped": (
        XLA,
        "hi = -(-np.clip(everything if some_to is None else some_to, 0, S) // c)",
        "hi = np.clip(everything if some_to is None else some_to, 0, S) // c",
        "float32:plain",
    ),
    "bias gradient not summed over tiles": (
        XLA,
        "bias = _add(total.bias, part.bias, ",
        "bias = _write(total.bias, part.bias, ",
        "float32:bias_row",
    ),
    "bias gradient in the wrong place": (XLA, "(*tile.first, 0, tile.row, tile.col)", "(0,) * 5", "float32:bias_full"),
    "gradients not accumulated": (
        XLA,
        "old + part.astype(total.dtype)",
        "part.astype(total.dtype)",
        "float32:plain",
    ),
    "NaN of hidden values leaks": (
        TILE,
        "return jnp.where(jnp.isfinite(x), x, 0) if masked else x",
        "return x",
        "tests/test_masks.py::test_hidden_garbage_changes_no_bit",
    ),
    "grouped heads in the wrong order": (
        ARGUMENTS,
        "heads = (shape.K, shape.G) if N == shape.N and N != 1 else (1, 1)",
        "heads = (shape.K, shape.G) if N == shape.N and N != 1 else (1, 1)\n    x = x[..., ::-1, :, :]",
        "float32:bias_row",
    ),
    "lse handed out without -inf": (
        "attention.py",
        "SEES_NOTHING, -jnp.inf",
        "SEES_NOTHING, 0.0",
        "tests/test_masks.py::test_rows_that_see_nothing",
    ),
    "edge tiles without a mask": (
        XLA,
        "keep = visible(problem, here, at_rows, at_cols, at) if masked",
        "keep = visible(problem, here, at_rows, at_cols, at) | True if masked",
        "float32:causal",
    ),
    # ---- scores, masks, transforms and statistics
    "T5 counts to the wrong side": (
        "scores.py",
        "away = jnp.maximum(-away, 0)",
        "away = jnp.maximum(away, 0)",
        f"{FUNCTIONS}t5_counts_to_the_sides_that_may_be_seen",
    ),
    "relative distances the wrong way round": (
        "scores.py",
        "jnp.clip(k_pos - q_pos, -reach, reach)",
        "jnp.clip(q_pos - k_pos, -reach, reach)",
        "tests/test_flex_examples.py",
    ),
    "the largest logit must be equal in bits": (
        "statistics.py",
        "close = 8 * jnp",
        "close = 0 * jnp",
        f"{FUNCTIONS}the_gradient_of_the_largest_logit_is_shared_by_what_rounding_may_part",
    ),
    "distance of statistics not weighted": (
        "statistics.py",
        "return out, lse.high, entropy, rows.m, distance / l",
        "return out, lse.high, entropy, rows.m, distance",
        f"{FUNCTIONS}statistics_and_key_mass",
    ),
    "blocks see up to the one before": (
        "masks.py",
        "k_pos // self.size <= q_pos // self.size",
        "k_pos // self.size < q_pos // self.size",
        "tests/test_flex_examples.py",
    ),
    "a prefix is one key too long": (
        "masks.py",
        "return k_pos < (length[batch]",
        "return k_pos <= (length[batch]",
        "tests/test_flex_examples.py",
    ),
    "keys normalised with the scales of queries": (
        "transforms.py",
        "params[which]",
        'params["query"]',
        f"{FUNCTIONS}rms_norm_divides_by_the_root_of_the_mean_square",
    ),
    "rms_norm without its epsilon": (
        "transforms.py",
        ".mean() + self.epsilon",
        ".mean()",
        f"{FUNCTIONS}rms_norm_divides_by_the_root_of_the_mean_square",
    ),
    "rotary turns one half the wrong way": (
        "transforms.py",
        "b * cos + a * sin",
        "b * cos - a * sin",
        f"'{FUNCTIONS}functions_beside_every_feature[causal]'",
    ),
    # ---- sinks, NaN in a bias, lengths
    "a sink takes nothing": (PROBLEM, "+ jnp.exp(sink - top)", "+ 0 * jnp.exp(sink - top)", SINKS),
    "a sink far above its keys leaves them": (XLA, "o = o * share[..., None]", "o = o * 1", SINKS),
    "gradient of sinks with the wrong sign": (RULES, "dsinks = -jnp.where(p == 0", "dsinks = jnp.where(p == 0", SINKS),
    "tangent of sinks left out": (
        RULES,
        "(dout - (p * dsinks[..., None])[..., None] * out)",
        "(dout - 0 * (p * dsinks[..., None])[..., None] * out)",
        SINKS,
    ),
    "lse with the sink in it": (
        RULES,
        "of_lse = implementation.backward(problem, bare, nothing, lse, nothing, dlse)",
        "of_lse = implementation.backward(problem, bare, nothing, total, nothing, dlse)",
        SINKS,
    ),
    "a block has the sinks of the first": (
        XLA,
        "_part(operands.terms.sinks, {0: (first[1], k)})",
        "_part(operands.terms.sinks, {0: (0, k)})",
        "tests/test_halves.py::test_block_by_block",
    ),
    "NaN in a bias hides a key": (
        PROBLEM,
        "~(sight.bias <= jnp.finfo(sight.bias.dtype).min)",
        "(sight.bias > jnp.finfo(sight.bias.dtype).min)",
        "tests/test_masks.py",
    ),
    "wide lengths wrap": (
        ARGUMENTS,
        "x = jnp.clip(x, max(least, int(limits.min)), min(most, int(limits.max)))",
        "del limits, least, most",
        "tests/test_errors.py tests/test_masks.py",
    ),
    "rows stand although large values overflowed": (
        XLA,
        "kept & (o < jnp.inf)",
        "kept & (o > -jnp.inf)",
        "tests/test_fixed_reference.py::test_one_column_that_overflows_is_enough",
    ),
    "one row's share of S flushed keys": (
        XLA,
        "lost = S * 2.0 ** (24 - 126)",
        "lost = 2.0 ** (0 - 126)",
        "tests/test_hard_inputs.py",
    ),
    # ---- kernels, in the interpreter
    "kernels: sinks in nats": (
        "pallas/hopper.py",
        "jnp.broadcast_to(sinks * LOG2_E,",
        "jnp.broadcast_to(sinks * 1.0,",
        "tests/test_hopper.py::test_values[sinks]",
    ),
    "kernels: a sink far above its keys leaves them": (
        "pallas/hopper_forward.py",
        "return share / (l * share + jnp.exp2(sink - top))",
        "return 1.0 / (l * share + jnp.exp2(sink - top))",
        "tests/test_hopper.py::test_values[sinks]",
    ),
    "kernels: 0 is taken for the reference of a row": (
        "pallas/hopper_forward.py",
        "bad = jnp.where((m == -jnp.inf) & (first < visits.total), 1.0, bad)",
        "bad = jnp.where((m == -jnp.inf) & (first < visits.total), bad, bad)",
        "tests/test_hopper_range.py::test_a_row_that_sees_no_logit_in_its_first_tiles_is_done_again",
    ),
    "kernels: rows that pad a tile see keys": (
        "pallas/walk.py",
        "if shape.T % queries:",
        "if problem.score_fn is not None and shape.T % queries:",
        "'tests/test_hopper.py::test_what_nobody_sees_changes_no_bit[keys behind the last query-fused]'",
    ),
    "kernels: a row that its reference cannot serve is not noticed": (
        "pallas/hopper_forward.py",
        "bad = jnp.maximum(jnp.where(l < 2.0**60, 0.0, 1.0)",
        "bad = 0 * jnp.maximum(jnp.where(l < 2.0**60, 0.0, 1.0)",
        "tests/test_hopper.py::test_rows_that_fail_leave_the_others_as_they_were",
    ),
    "kernels: the cotangent of lse with the wrong sign": (
        "pallas/hopper_backward.py",
        "delta + plgpu.load(delta_s, layout=ROW) if",
        "delta - plgpu.load(delta_s, layout=ROW) if",
        "tests/test_hopper.py::test_values[128]",
    ),
    "kernels: a tile that another segment enters has no mask": (
        "pallas/walk.py",
        "alone=(in_order & (lowest == highest))",
        "alone=(in_order & (lowest <= highest))",
        "tests/test_hopper.py::test_visits_of_segments_in_order",
    ),
    "kernels: some blocks have much more to do": (
        "pallas/walk.py",
        "if best[0] >= BALANCED:",
        "if best[0] >= 0.5:",
        "tests/test_hopper.py::test_blocks_that_stay_have_equally_much_to_do",
    ),
    "kernels: a warpgroup passes by a tile that it sees": (
        "pallas/walk.py",
        "jnp.clip(self.high - part.high, 0, self.masked)",
        "jnp.clip(self.high - part.high + 1, 0, self.masked)",
        "tests/test_hopper.py::test_visits_are_what_the_picture_has",
    ),
    "kernels: masked keys behind the last that may attend are seen": (
        "pallas/hopper.py",
        "jnp.where(before, -1, 1)",
        "jnp.where(before, -1, 0)",
        "'tests/test_hopper.py::test_values[keys masked, padded]'",
    ),
    "kernels: the fused dq without its slope": (
        "pallas/hopper.py",
        "lowered(dq * hopper_backward.Gradient(problem).slope, query.dtype)",
        "lowered(dq * 1.0, query.dtype)",
        "'tests/test_hopper.py::test_fused_gradient[one block]'",
    ),
    "kernels: a score of the user's in bits": (
        "problem.py",
        "return finish(problem, raw, terms, keep, at) * LOG2_E",
        "return finish(in_bits(problem), raw, terms, keep, at)",
        "tests/test_hopper_functions.py::test_values[alibi]",
    ),
    "kernels: all heads have the numbers of the first": (
        "pallas/pairs.py",
        "tuple(ref[n] for ref in scalars.of_heads)",
        "tuple(ref[0] for ref in scalars.of_heads)",
        "tests/test_hopper_functions.py::test_values[alibi]",
    ),
    "kernels: numbers of differences are one off": (
        "pallas/hoisted.py",
        "dtype=jnp.int32) - behind(S)",
        "dtype=jnp.int32) - behind(S) + 1",
        "tests/test_hopper_functions.py::test_values[t5]",
    ),
    "kernels: the walk for params is one diagonal off": (
        "pallas/walked.py",
        "rows[0] - cols[0] - (c - 1) + self.behind",
        "rows[0] - cols[0] - c + self.behind",
        "tests/test_hopper_functions.py::test_values[t5]",
    ),
    "kernels: a block mask's tiles need no mask where a window ends": (
        "pallas/walk.py",
        "every & (all_from <= col)",
        "every",
        "tests/test_hopper_functions.py::test_tables_list_what_is_seen",
    ),
    "kernels: the tangent of a row keeps what its keys have in common": (
        "pallas/hopper_tangent.py",
        "c = jnp.where(l > 0, c,",
        "c = jnp.where(l >= 0, c,",
        "'tests/test_hopper_tangent.py::test_what_a_row_has_in_common_takes_no_bits[causal]'",
    ),
    "kernels: the tangent of lse without what its keys have in common": (
        "pallas/hopper_tangent.py",
        "lse_s[mine] = r + c",
        "lse_s[mine] = r",
        "'tests/test_hopper_tangent.py::test_values[128]'",
    ),
    "kernels: NaN in the tangents of hidden values is not cleaned": (
        "pallas/hopper_tangent.py",
        "for ref in filter(None, values_s):",
        "for ref in filter(None, values_s[:1]):",
        "'tests/test_hopper_tangent.py::test_what_nobody_sees_changes_no_bit[nan]'",
    ),
    "kernels: sums over query heads elsewhere are left out": (
        "pallas/mapped.py",
        "lax.psum(x, over)",
        "x",
        "tests/test_hopper.py::test_devices_run_their_own_part",
    ),
}


def copy_to(where: pathlib.Path) -> pathlib.Path:
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("memeff", "tests"):
        shutil.copytree(HERE.parent / folder, where / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(HERE.parent / file, where)
    (where / "numbers_.py").write_text(NUMBERS)
    return where


def caught_by(where: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
    """Runs the named cases or tests on the copy of memeff in `where`."""
    words = shlex.split(tests)
    if all(":" in word and "::" not in word for word in words):
        command = [sys.executable, "numbers_.py", *words]
    else:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    env = {**os.environ, "PYTHONPATH": str(where)}
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=600)


@functools.cache
def _whole(tests: str, where: pathlib.Path) -> tuple[int, str]:
    done = caught_by(where, tests)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    return copy_to(tmp_path_factory.mktemp("unharmed"))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_has_its_place(name):
    file, text, instead, _ = MUTANTS[name]
    assert (HERE.parent / "memeff" / file).read_text().count(text) == 1, f"{file} has no such text (once): {text}"
    assert text != instead


@pytest.mark.slow
def test_the_copy_is_what_runs(tmp_path):
    where = copy_to(tmp_path)
    (where / "memeff" / "version.py").write_text('__version__ = "a copy"\n')
    code = "import memeff; print(memeff.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "a copy", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_caught(name, tmp_path, unharmed):
    """The same tests pass on memeff as it is, and fail on the mutant by an assertion (not because it does not run)."""
    file, text, instead, tests = MUTANTS[name]
    if file.startswith("pallas") and jax.__version__.startswith("0.10."):
        pytest.skip("kernels need jax 0.11, and this is 0.10")
    where = copy_to(tmp_path)
    source = where / "memeff" / file
    source.write_text(source.read_text().replace(text, instead))
    status, words = _whole(tests, unharmed)
    assert status == 0, words[-2000:]
    done = caught_by(where, tests)
    words = done.stdout + done.stderr
    assert done.returncode != 0, f"not caught by {tests}"
    assert "AssertionError" in words or "assert " in words, f"does not run:\n{words[-2000:]}"
