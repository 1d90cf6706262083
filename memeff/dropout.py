"""Compute dropout's mask from coordinates, one tile at a time, by one of two generators.

"threefry" draws Flax's mask: Threefry-2x32 with 20 rounds at the flat index of each pair.
"mix32" takes a product, a sum and a comparison for a pair, and Threefry only at tokens and heads:
  query i:  (a_i, b_i) = threefry(key; 0, i)     key j:  (c_j, _) = threefry(key; 1, j)
  head n of batch entry b:  (u, v) = threefry(key; 2, b N + n); 0 if all share one mask
  x = (a_i ^ u) + ((b_i ^ v) | 1) c_j;  keep if x < threshold
in 32 bits, with x as a signed number. This is multiply-add hashing (Dietzfelbinger 1996) of random
arguments c. As far as Threefry's words are random, any two pairs of a mask are independent. All
pairs of one row are independent because b is odd, and all pairs of one column because a is added.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import Dropout, Operands, Problem


def dropout_keep_mask(
    problem: Problem,
    operands: Operands,
    like: Array,
    first,
    sizes: tuple[int, int, int],
    rows: Array,
    cols: Array,
) -> Array:
    """Return the keep-mask [1|B, 1|K, 1|G, t, c] of a tile.

    It depends on coordinates alone, so it is the same for any tiles. With threefry it equals
    `jax.random.bernoulli(key, 1 - rate, [B, N, T, S])` (or [T, S] if shared) with threefry's
    partitionable counters, which are flat indices. Flax draws the same mask for the same key.
    `like` [B, K, G] gives the tile's shape and its layout over devices. `first` holds its first
    batch entry and key head, and `sizes` are N, T and S.
    """
    assert problem.dropout is not None and operands.dropout_key is not None
    origin = operands.origin
    if problem.whole is not None and origin is not None:
        sizes = problem.whole.N, problem.whole.T, problem.whole.S
        rows = origin.first_query + problem.whole.stride * rows
        cols = origin.first_key + problem.whole.stride * cols
    N, T, S = sizes
    head = None if problem.dropout.shared else _head_numbers(operands, like, N, first)
    if problem.dropout.bits == "mix32":
        return _mix32_keep_mask(problem.dropout, operands.dropout_key, head, rows, cols)
    if head is None:
        head = jnp.zeros((1, 1, 1), jnp.uint32)
    high, low = _multiply_add(head[..., None], T, rows.astype(jnp.uint32))  # b k g t
    high = high[..., None] * jnp.uint32(S)
    low = low[..., None]
    carry, low = _multiply_add(low, S, cols.astype(jnp.uint32))  # b k g t c
    keep_rate = 1.0 - problem.dropout.rate
    return _uniform_below(operands.dropout_key, high + carry, low, keep_rate)


def _head_numbers(operands: Operands, like: Array, N: int, first) -> Array:
    """Return the number b N + n of each query head of a tile, like `like` [B, K, G]."""
    zero = jnp.zeros_like(like, jnp.uint32)
    G = like.shape[2]
    b, k, g = (lax.broadcasted_iota(jnp.uint32, like.shape, dim) for dim in range(3))
    b = b + jnp.uint32(first[0])
    head = (k + jnp.uint32(first[1])) * G + g
    if operands.origin is not None:
        b = b + operands.origin.first_batch.astype(jnp.uint32)
        head = head + operands.origin.first_head.astype(jnp.uint32)
    return zero + (b * N + head)


def _multiply_add(x: Array, size: int, y: Array) -> tuple[Array, Array]:
    """Return x * size + y as the high and low 32 bits, because x64 may be off; `size` < 2^32."""
    x, y = jnp.broadcast_arrays(x, y)
    half = jnp.uint32(16)
    mask = jnp.uint32(0xFFFF)
    s1 = jnp.uint32(size >> 16)
    s0 = jnp.uint32(size & 0xFFFF)
    x1 = x >> half
    x0 = x & mask
    middle = x1 * s0 + ((x0 * s0) >> half)  # at most 2^32 - 1
    middle0 = (middle & mask) + x0 * s1
    high = x1 * s1 + (middle >> half) + (middle0 >> half)
    product = x * jnp.uint32(size)
    low = product + y
    carry = low < product
    return high + carry.astype(jnp.uint32), low


def _uniform_below(key: Array, high: Array, low: Array, p: float) -> Array:
    """Return bernoulli(p) at the 64-bit counters (high, low), equal to `jax.random.bernoulli`."""
    from jax.extend.random import threefry2x32_p

    high, low = jnp.broadcast_arrays(high, low)
    high, zero = _mapped_alike(key, high)
    # sharded as `high` is, or XLA gathers `high`
    bits1, bits2 = threefry2x32_p.bind(key[0] + zero, key[1] + zero, high, low + zero)
    # the exponent of 1.0 before random bits of the fraction is a float in [1, 2)
    if jax.dtypes.canonicalize_dtype(float) == jnp.float64:  # bernoulli then draws float64
        bits = bits1.astype(jnp.uint64) << jnp.uint64(32)
        bits = bits | bits2.astype(jnp.uint64)
        bits = (bits >> jnp.uint64(12)) | jnp.uint64(0x3FF << 52)
        unit = lax.bitcast_convert_type(bits, jnp.float64) - 1.0
    else:
        bits = bits1 ^ bits2
        bits = (bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
        unit = lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(1)
    return unit < jnp.asarray(p, unit.dtype)


def _mapped_alike(key: Array, counter: Array) -> tuple[Array, Array]:
    """Return the counter, and 0 in its shape, both mapped by every vmap of the key and the counter.

    If one vmap maps the key and another the counter, JAX's Threefry fails to broadcast them.
    """
    counter = counter + (key[0] ^ key[0])
    return counter, counter ^ counter


class QueryWords(NamedTuple):
    """Two random words for each query, or for each head; int32."""

    a: Array
    b: Array


def query_words(key: Array, rows: Array) -> QueryWords:
    """Return the words a and b of the queries at `rows`, of the shape of `rows`."""
    return QueryWords(*_threefry_words(key, 0, rows))


def key_words(key: Array, cols: Array) -> Array:
    """Return the word c of the keys at `cols`."""
    return _threefry_words(key, 1, cols)[0]


def head_words(key: Array, heads: Array) -> QueryWords:
    """Return the words u and v of the heads with the numbers b N + n."""
    return QueryWords(*_threefry_words(key, 2, heads))


def words_of_head(words: QueryWords, head: QueryWords | None) -> QueryWords:
    """Return a ^ u and (b ^ v) | 1, the words of queries in one head; the shapes broadcast."""
    if head is not None:
        words = QueryWords(words.a ^ head.a, words.b ^ head.b)
    return words._replace(b=words.b | 1)


def mix32_keep(dropout: Dropout, words: QueryWords, c: Array) -> Array:
    """Return True where a pair is kept, from `words_of_head` and `key_words`; shapes broadcast.

    Kernels call this, too, on tiles whose dims are [t, c] or [c, t].
    """
    keep_rate = 1.0 - dropout.rate
    threshold = min(round(keep_rate * 2**32) - 2**31, 2**31 - 1)
    return words.a + words.b * c < jnp.int32(threshold)


def _threefry_words(key: Array, domain: int, number: Array) -> tuple[Array, Array]:
    """Return two words, int32, of Threefry-2x32 at the counter (domain, number)."""
    from jax.extend.random import threefry2x32_p

    low, zero = _mapped_alike(key, number.astype(jnp.uint32))
    words = threefry2x32_p.bind(key[0] + zero, key[1] + zero, zero + jnp.uint32(domain), low)
    a, b = (lax.bitcast_convert_type(x, jnp.int32) for x in words)
    return a, b


def _mix32_keep_mask(
    dropout: Dropout, key: Array, head: Array | None, rows: Array, cols: Array
) -> Array:
    """Return the keep-mask [1|B, 1|K, 1|G, t, c] of heads with the numbers `head` [B, K, G]."""
    a, b = query_words(key, rows)
    words = QueryWords(a[None, None, None], b[None, None, None])  # 1 1 1 t
    of_head = None
    if head is not None:
        of_head = QueryWords(*(x[..., None] for x in head_words(key, head)))
    words = QueryWords(*(x[..., None] for x in words_of_head(words, of_head)))
    return mix32_keep(dropout, words, key_words(key, cols)[None, None, None, None])
