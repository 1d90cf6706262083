"""A table of wrong calls: arguments, the error that they raise, and a pattern of its message."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import raising

RNG_KEY = np.array([0, 1], np.uint32)
RATE = {"dropout_rate": 0.5}
KEYS = jax.random.split(jax.random.key(0), 320)


def ones(*shape, dtype=np.float32):
    """Return an array of ones."""
    return np.ones(shape, dtype)


# Arguments that a right call has. A row of WRONG replaces some of them or adds to them.
RIGHT = {"query": ones(2, 5, 4, 8), "key": ones(2, 7, 2, 8), "value": ones(2, 7, 2, 6)}

WRONG = raising(
    ValueError,
    # query, key, value
    (
        {"query": ones(5, 8)},
        r"query must have shape \[\*B, T, N, H\] with at least 3 dims; got \(5, 8\)",
    ),
    (
        {"key": ones(7, 8)},
        r"key must have shape \[\*B, S, K, H\] with at least 3 dims; got \(7, 8\)",
    ),
    ({"value": ones(6)}, r"value must have shape \[\*B, S, K, D\] .*; got \(6,\)"),
    (
        {"key": ones(3, 7, 2, 8)},
        r"key must have shape \(2, S, K, H=8\), with the leading dims of query; got \(3, 7, 2, 8\)",
    ),
    (
        {"key": ones(7, 2, 8)},
        r"key must have shape \(2, S, K, H=8\), with the leading dims of query; got \(7, 2, 8\)",
    ),
    (
        {"key": ones(2, 7, 2, 9)},
        r"key must have the head size of query, H=8; got 9 \(shape \(2, 7, 2, 9\)\)",
    ),
    (
        {"value": ones(2, 6, 2, 6)},
        r"value must have shape \(2, S=7, K=2, D\), like key; got \(2, 6, 2, 6\)",
    ),
    (
        {"value": ones(2, 7, 4, 6)},
        r"value must have shape \(2, S=7, K=2, D\), like key; got \(2, 7, 4, 6\)",
    ),
    (
        {"query": ones(2, 5, 3, 8)},
        r"query has 3 heads and key has 2: query heads \(N\) must be a multiple of key heads \(K\)",
    ),
    (
        {"key": ones(2, 7, 0, 8), "value": ones(2, 7, 0, 6)},
        r"query has 4 heads and key has 0: query heads",
    ),
    (
        {"query": ones(2, 5, 4, 0), "key": ones(2, 7, 2, 0)},
        r"query has head size H=0: .*Use H >= 1",
    ),
    # bias and mask
    (
        {"bias": ones(2, 4, 5, 8)},
        r"bias must be broadcastable to \(2, N=4, T=5, S=7\); got \(2, 4, 5, 8\)",
    ),
    (
        {"bias": ones(2, 2, 5, 7)},
        r"bias must be broadcastable to \(2, N=4, T=5, S=7\); got \(2, 2, 5, 7\)",
    ),
    ({"bias": ones(3, 1, 1, 1, 1)}, r"bias must be broadcastable to .*; got \(3, 1, 1, 1, 1\)"),
    (
        {"mask": ones(5, 6, dtype=bool)},
        r"mask must be broadcastable to \(2, N=4, T=5, S=7\); got \(5, 6\)",
    ),
    ({"mask": ones(2, 7, dtype=bool)}, r"mask must be broadcastable to .*; got \(2, 7\)"),
    # numbers that are none, or do not fit
    (
        {
            "query_segment_ids": np.full((2, 5), 2**32),
            "key_value_segment_ids": np.full((2, 7), 2**32),
        },
        r"query_segment_ids has integers that do not fit in int32: .*jax_enable_x64",
    ),
    (
        {"key_value_seq_lengths": np.array([2**63, 1], np.uint64)},
        r"key_value_seq_lengths has integers that do not fit in uint32",
    ),
    ({"query_seq_lengths": [2**40, 1]}, r"query_seq_lengths has integers that do not fit in int32"),
    # scale and soft cap
    ({"scale": jnp.float32(np.nan)}, r"scale=nan: it must be finite"),
    ({"logits_soft_cap": jnp.float32(-5)}, r"logits_soft_cap=-5: a cap must be > 0"),
    ({"logits_soft_cap": np.zeros(1)}, r"logits_soft_cap=0: a cap must be > 0"),
    ({"logits_soft_cap": np.array(np.inf)}, r"logits_soft_cap=inf: it must be finite"),
    ({"scale": 1e39}, r"scale=1e\+39: it must be finite in float32"),
    ({"logits_soft_cap": 1e-50}, r"logits_soft_cap=1e-50: a cap must be > 0, also in float32; "),
    ({"logits_soft_cap": 10**39}, r"logits_soft_cap=1e\+39: it must be finite in fl"),
    ({"scale": float("nan")}, r"scale=nan: it must be finite"),
    ({"scale": 10**400}, r"scale is an int beyond the largest float: make it smaller"),
    (
        {"scale": ones(4)},
        r"scale must be a number or a scalar array, got shape \(4,\)\. Scale query per head",
    ),
    ({"logits_soft_cap": 0}, r"logits_soft_cap=0: a cap must be > 0; use None for no cap"),
    ({"logits_soft_cap": -5.0}, r"logits_soft_cap=-5: a cap must be > 0; use None"),
    ({"logits_soft_cap": np.inf}, r"logits_soft_cap=inf: it must be finite"),
    # positions
    (
        {"local_window_size": (1, 2, 3)},
        r"local_window_size=\(1, 2, 3\): give \(left, right\), or one int",
    ),
    (
        {"local_window_size": (-1, 0)},
        r"local_window_size=\(-1, 0\): sides count tokens and must be >= 0; use None for an unb",
    ),
    ({"local_window_size": -4}, r"local_window_size=-4: sides count tokens and must be >= 0"),
    (
        {"q_offset": ones(3, dtype=np.int32)},
        r"q_offset must have the leading dims of query, \(2,\); got shape \(3,\)",
    ),
    (
        {"q_offset": 2**29},
        r"q_offset=536870912: positions must lie between -536870911 and 536870911",
    ),
    ({"q_offset": np.array([0, -(2**31) + 5])}, r"q_offset=-2147483643: positions must lie"),
    (
        {"query_seq_lengths": np.array([5, 6])},
        r"query_seq_lengths must lie between 0 and T=5; got 5 to 6",
    ),
    (
        {"key_value_seq_lengths": np.array([-1, 7])},
        r"key_value_seq_lengths must lie between 0 and S=7; got -1 to 7",
    ),
    ({"key_value_seq_lengths": 8}, r"key_value_seq_lengths must lie between 0 and S=7; got 8 to 8"),
    (
        {"key_value_seq_lengths": ones(3, dtype=np.int32)},
        r"key_value_seq_lengths must have the leading dims of query, \(2,\)",
    ),
    # segments
    (
        {"query_segment_ids": ones(2, 5, dtype=np.int32)},
        r"query_segment_ids came without key_value_segment_ids, and T=5 is not S=7",
    ),
    (
        {"key_value_segment_ids": ones(2, 7, dtype=np.int32)},
        r"key_value_segment_ids came without query_segment_ids: pass both",
    ),
    (
        {
            "query_segment_ids": ones(2, 7, dtype=np.int32),
            "key_value_segment_ids": ones(2, 7, dtype=np.int32),
        },
        r"query_segment_ids must have shape \(2, T=5\); got \(2, 7\)",
    ),
    (
        {
            "query_segment_ids": ones(2, 5, dtype=np.int32),
            "key_value_segment_ids": ones(3, 7, dtype=np.int32),
        },
        r"key_value_segment_ids must have shape \(2, S=7\); got \(3, 7\)",
    ),
    # implementation, backward, chunk_size and precision
    (
        {"backward": "both"},
        r"backward='both' is not known: use None or one of 'split', 'fused', 'fastest'\.",
    ),
    ({"backward": np.ones(2)}, r"backward=ndarray\(.*\) is not known"),
    (
        {"dropout_rng": RNG_KEY, "dropout_bits": np.ones(2)} | RATE,
        r"dropout_bits=ndarray\(.*\) is not known",
    ),
    ({"implementation": ""}, r"implementation='' is not known: use None or one of"),
    (
        {"implementation": "flash"},
        r"implementation='flash' is not known: use None or one of 'xla', 'reference', 'pallas'",
    ),
    (
        {"chunk_size": 0},
        r"chunk_size=0: sides count tokens and must be >= 1; omit it for the default",
    ),
    ({"chunk_size": (128, -1)}, r"chunk_size=\(128, -1\): sides count tokens and must be >= 1"),
    (
        {"chunk_size": (1, 2, 3)},
        r"chunk_size=\(1, 2, 3\): give \(query, key\) in tokens, or one int for both",
    ),
    (
        {"precision": "very"},
        r"precision='very' must be None, \"default\", \"high\", \"highest\", a jax\.lax\.Precision",
    ),
    ({"precision": {"a": 1}}, r"precision=\{'a': 1\} must be None"),
    # dropout
    (RATE, r"dropout_rate=0\.5 came without dropout_rng: pass a key, or omit dropout_rate"),
    ({"dropout_rate": 10**400}, r"dropout_rate is an int beyond the largest float"),
    ({"dropout_rate": 1.0, "dropout_rng": RNG_KEY}, r"dropout_rate=1: .* must lie in \[0, 1\)"),
    ({"dropout_rate": -0.1}, r"dropout_rate=-0\.1: .* must lie in \[0, 1\)"),
    ({"dropout_rate": float("nan")}, r"dropout_rate=nan: .* must lie in \[0, 1\)"),
    (
        {"dropout_bits": "philox"},
        r"dropout_bits='philox' is not known: use one of 'threefry', 'mix32'\.",
    ),
    # a sequence over many devices: tests/test_many_devices.py has more
    (
        {"sequence_axis": "rows"},
        r"sequence_axis='rows' is no axis of a mesh here \(axes of the context: none\)",
    ),
    (
        {"head_axis": "model"},
        r"head_axis='model' is no axis of a jax.shard_map around .*Omit head_axis where the arrays",
    ),
    ({"batch_axis": "x", "head_axis": "x"}, r"mesh axis 'x' is named twice"),
    ({"sequence_layout": np.ones(2)}, r"sequence_layout=.* is not known"),
    ({"sequence_layout": "zigzag"}, r"sequence_layout.* pass sequence_axis"),
    ({"context_parallel": "ring"}, r"context_parallel are for .* pass sequence_axis"),
)
WRONG += raising(
    TypeError,
    # query, key, value
    ({"query": None}, r"query must be an array, got None"),
    ({"key": "keys"}, r"key must be an array, got str 'keys'"),
    ({"value": {"a": 1}}, r"value must be an array, got dict"),
    ({"value": [[1.0], [1.0, 2.0]]}, r"value must be an array, got list"),
    ({"query": ones(2, 5, 4, 8, dtype=object)}, r"query has dtype object, which JAX.*Cast"),
    ({"bias": np.ma.array(ones(5, 7))}, r"bias is a masked array, .* Pass what its `filled` gives"),
    (
        {"query": ones(2, 5, 4, 8, dtype=np.int32)},
        r"query must be a floating-point array, got int32\. Cast it",
    ),
    ({"value": ones(2, 7, 2, 6, dtype=bool)}, r"value must be a floating-point array, got bool"),
    (
        {"key": ones(2, 7, 2, 8, dtype=np.complex64)},
        r"key must be a floating-point array, got complex64",
    ),
    (
        {"key": ones(2, 7, 2, 8, dtype=np.float16)},
        r"key is float16 and query is float32: .* one dtype\. Cast one",
    ),
    ({"value": jnp.ones((2, 7, 2, 6), jnp.bfloat16)}, r"value is bfloat16 and query is float32"),
    (
        dict.fromkeys(("query", "key", "value"), jnp.ones((1, 3, 1, 2), jnp.float8_e4m3fn)),
        r"query is float8_e4m3fn: supported are bfloat16, .*Cast it",
    ),
    # bias and mask
    (
        {"bias": ones(5, 7, dtype=bool)},
        r"bias must be floating point .*, got bool\. Pass a boolean one as mask=",
    ),
    (
        {"bias": ones(5, 7, dtype=np.complex64)},
        r"bias must be floating point .*, got complex64\. Cast it",
    ),
    (
        {"mask": ones(5, 7)},
        r"mask must be boolean \(True = may attend\), got float32\. Pass an additive term as bias=",
    ),
    ({"mask": ones(5, 7, dtype=np.int32)}, r"mask must be boolean .*, got int32\. .*mask != 0"),
    ({"mask": "causal"}, r"mask must be an array, got str 'causal'"),
    # numbers that are none, or do not fit
    ({"query": KEYS.reshape(2, 5, 4, 8)}, r"query must be a floating-point array, got key<fry>"),
    ({"bias": KEYS.reshape(2, 4, 5, 8)[..., :7]}, r"bias must be floating point .*, got key<fry>"),
    # scale and soft cap
    ({"scale": KEYS[0]}, r"scale must be floating point, got an array of key<fry>"),
    ({"scale": "big"}, r"scale must be a number or a scalar array, got str 'big'"),
    ({"scale": True}, r"scale must be a number or a scalar array, got bool True"),
    ({"scale": np.array(1j)}, r"scale must be floating point, got an array of complex"),
    ({"logits_soft_cap": [30.0]}, r"logits_soft_cap must be a number or a scalar array, got list"),
    # positions
    ({"is_causal": 1}, r"is_causal must be True or False .*, got int 1"),
    ({"is_causal": "yes"}, r"is_causal must be True or False .*, got str 'yes'"),
    (
        {"is_causal": jnp.array(True)},
        r"is_causal must be True or False \(it is fixed while tracing\)",
    ),
    (
        {"local_window_size": 2.5},
        r"local_window_size=2\.5: sides are ints \(tokens\) or None, got float 2\.5",
    ),
    (
        {"local_window_size": (True, 1)},
        r"local_window_size=\(True, 1\): sides are ints .*, got bool True",
    ),
    ({"q_offset": 1.5}, r"q_offset must be integers, got float"),
    ({"q_offset": "a"}, r"q_offset must be an int or integers \[\*B\] \(positions\), got str"),
    ({"q_offset": None}, r"q_offset must be an int or integers \[\*B\] \(positions\), got None"),
    ({"query_seq_lengths": ones(2)}, r"query_seq_lengths must be integers, got float32"),
    (
        {"key_value_seq_lengths": ones(2, 7, dtype=bool)},
        r"key_value_seq_lengths must be integers, got bool",
    ),
    # segments
    (
        {"query_segment_ids": ones(2, 5), "key_value_segment_ids": ones(2, 7, dtype=np.int32)},
        r"query_segment_ids must be integers, got float32",
    ),
    # implementation, backward, chunk_size and precision
    (
        {"implementation": np.ones(2)},
        r"implementation must be a name or None \(it is fixed while tracing\), got ndarray",
    ),
    ({"return_residual": "yes"}, r"return_residual must be True or False .*'yes'"),
    (
        {"return_residual": np.ones(2)},
        r"return_residual must be True or False \(it is fixed while tracing\), got ndarray",
    ),
    (
        {"score_fn": lambda s, b, h, i, j, params: s, "score_params": {"slope": "steep"}},
        r"each leaf of score_params must be an array, got str 'steep'",
    ),
    (
        {"qk_transform": lambda x, position, which, params: x, "qk_transform_params": "base"},
        r"each leaf of qk_transform_params must be an array, got str 'base'",
    ),
    ({"chunk_size": 64.0}, r"chunk_size=64\.0: sides are ints \(tokens\), got float 64\.0"),
    # dropout
    ({"dropout_rate": "0.5"}, r"dropout_rate must be a number .*, got str '0\.5'"),
    (
        {"dropout_rate": jnp.float32(0.5), "dropout_rng": RNG_KEY},
        r"dropout_rate must be a number \(it is fixed while tracing\)",
    ),
    (
        {"dropout_rng": 0, **RATE},
        r"dropout_rng must be one key of jax\.random\.key or PRNGKey, got int32 of shape \(\)",
    ),
    (
        {"dropout_rng": ones(3, 2, dtype=np.uint32), **RATE},
        r"dropout_rng must be one key .*, got uint32 of shape \(3, 2\)",
    ),
    (
        {"dropout_rng": jax.random.split(jax.random.key(0), 3), **RATE},
        r"dropout_rng must be one key .* of shape \(3, 2\)",
    ),
    (
        {"dropout_rng": jax.random.PRNGKey(0, impl="rbg"), **RATE},
        r"dropout_rng must be one key .* of shape \(4,\)\. Make it with .*threefry2x32",
    ),
    ({"broadcast_dropout": None}, r"broadcast_dropout must be True or False .*, got None"),
    # Flax's hooks
    (
        {"deterministic": True},
        r"deterministic= is a hook of Flax's modules, .*: "
        r"give the modules attention_fn=memeff\.nn\.attention_fn",
    ),
    (
        {"deterministic": False, "dtype": None, "module": None},
        r"deterministic= is a hook of Flax's modules",
    ),
    ({"dtype": "bfloat16"}, r"dtype= is a hook of Flax's modules, .*cast arrays before"),
    ({"module": object()}, r"module= is a hook of Flax's modules, .*memeff\.nn\.attention_fn"),
    # a sequence over many devices: tests/test_many_devices.py has more
    ({"sequence_axis": 3}, r"sequence_axis must be the name of a mesh axis, or two names, got 3"),
    ({"batch_axis": 3}, r"batch_axis must be the name of a mesh axis, or a tuple"),
)
WRONG += raising(
    NotImplementedError,
    # implementation, backward, chunk_size and precision
    (
        {"implementation": "pallas"},
        r'implementation="pallas" cannot run this call: .*\. '
        r'Use implementation=None .*"xla", which always runs',
    ),
    ({"implementation": "cudnn"}, r'implementation="cudnn" cannot run this call: .*jax\.nn'),
    ({"backward": "fused"}, r'backward="fused" cannot run this call: .*\. Omit `backward`'),
    (
        {"backward": "fused", "implementation": "xla"},
        r'"xla" cannot run this call: only the kernels support backward="fused"\. Omit',
    ),
    # dropout
    (
        {"dropout_rng": jax.random.key(0, impl="rbg"), **RATE},
        r'dropout_rng is a key of .*rbg.*threefry2x32.*Or pass dropout_bits="mix32"',
    ),
)
