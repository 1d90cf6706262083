"""Tiles that are visited: as the schedule lists them, and as the loops run."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import split
from conftest import few

from memeff import dot_product_attention
from memeff.chunked import fixed_max, forward, schedule
from memeff.chunked.tile import tile_logits
from memeff.masking import mask_tile
from memeff.problem import LogitParams, Operands, Problem

pytestmark = pytest.mark.once

f32 = np.float32
Tile = tuple[int, int]  # indices i of queries and j of keys


def picture(problem: Problem, operands: Operands) -> np.ndarray:
    """Return who sees whom, T S, by `mask_tile` on all positions."""
    T = operands.query.shape[1]
    S = operands.key.shape[1]
    keep = mask_tile(problem, operands, jnp.arange(T), jnp.arange(S))
    keep = np.broadcast_to(keep, (1, 1, 1, T, S))
    return keep.any((0, 1, 2))


def operands_of_length(T, S, **kwargs) -> Operands:
    query = jnp.zeros((1, T, 1, 2))
    key = jnp.zeros((1, S, 1, 2))
    return Operands(query, key, jnp.zeros_like(key), **kwargs)


def cut(seen: np.ndarray, t: int, c: int) -> dict[Tile, np.ndarray]:
    """Return the part of the picture that belongs to query tile i and key tile j, by (i, j)."""
    T, S = seen.shape
    parts = {}
    for i in range(-(-T // t)):
        for j in range(-(-S // c)):
            rows = slice(i * t, i * t + t)
            cols = slice(j * c, j * c + c)
            parts[i, j] = seen[rows, cols]
    return parts


def needed_tiles(seen: np.ndarray, t: int, c: int) -> set[Tile]:
    """Return the tiles in which some query sees some key."""
    return {tile for tile, part in cut(seen, t, c).items() if part.any()}


def as_set(tiles) -> set[Tile]:
    return {(int(i), int(j)) for i, j in tiles}


WINDOWS = {
    "full": {},
    "causal": dict(right=0),
    "window": dict(left=9, right=4),
    "left": dict(left=5),
    "right": dict(right=7),
    "one": dict(left=0, right=0),
    "wide": dict(left=1000, right=1000),
    "ahead": dict(right=0, q_offset=16),
    "behind": dict(right=0, q_offset=-20),
    "window ahead": dict(left=6, right=0, q_offset=21),
    "window past the end": dict(left=6, right=0, q_offset=50),
    "nobody": dict(left=3, right=0, q_offset=1000),
    "nobody before": dict(right=0, q_offset=-1000),
}
SIZES = [
    (37, 53, 16, 24),
    (53, 37, 7, 13),
    (48, 48, 16, 16),
    (41, 41, 8, 8),
    (1, 53, 1, 7),
    (37, 1, 5, 1),
    (31, 33, 31, 33),
]


@pytest.mark.parametrize("T, S, t, c", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_are_those_of_the_picture(window, T, S, t, c):
    problem = Problem(**WINDOWS[window])
    operands = operands_of_length(T, S)
    seen = picture(problem, operands)
    whole, edge = schedule.tiles_by_mask(problem, (t, c), operands)
    whole_set = as_set(whole)
    edge_set = as_set(edge)
    assert len(whole_set) == len(whole), "a tile is visited twice"
    assert len(edge_set) == len(edge), "a tile is visited twice"
    assert not whole_set & edge_set
    assert whole_set | edge_set == needed_tiles(seen, t, c)
    parts = cut(seen, t, c)
    full_size = {tile for tile, part in parts.items() if part.shape == (t, c)}
    assert whole_set == {tile for tile in full_size if parts[tile].all()}, "tiles that need no mask"


@pytest.mark.parametrize("term", ["mask", "segments", "bias"])
def test_no_tile_goes_unmasked_where_elements_decide(term):
    T = 37
    S = 53
    extra = {
        "mask": dict(mask=jnp.ones((1, 1, 1, T, S), bool)),
        "segments": dict(q_segments=jnp.zeros((1, T), int), kv_segments=jnp.zeros((1, S), int)),
        "bias": dict(logit_params=LogitParams(bias=jnp.zeros((1, 1, 1, T, S)))),
    }[term]
    problem = Problem(right=0)
    operands = operands_of_length(T, S, **extra)
    whole, edge = schedule.tiles_by_mask(problem, (16, 24), operands)
    assert len(whole) == 0
    assert as_set(edge) == needed_tiles(picture(problem, operands), 16, 24)


def _forward_and_backward(T=37, S=53, **kwargs):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), f32)

    q = draw(2, T, 4, 5)
    k = draw(2, S, 2, 5)
    v = draw(2, S, 2, 7)
    bias = draw(4, 1, S)

    def call(q, k, v, bias):
        return dot_product_attention(
            q, k, v, bias, return_residual=True, chunk_size=(8, 12), **kwargs
        )

    run = jax.jit(functools.partial(jax.vjp, call))
    (out, lse), pull = run(q, k, v, bias)
    dout = draw(*out.shape)
    dlse = draw(*lse.shape)
    dlse = jnp.where(jnp.isfinite(lse), dlse, 0)
    return out, lse, jax.jit(pull)((dout, dlse))


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param(dict(is_causal=True), marks=pytest.mark.slow),
        pytest.param(dict(local_window_size=(9, 4)), marks=pytest.mark.slow),
        dict(is_causal=True, q_offset=-11),
        # Not T = 5, because that is one tile, a program without a loop. Its bits are the same with
        # this file's flags and on jaxlib 0.12. On 0.10 with LLVM's optimisations, XLA contracts it
        # otherwise, and dq differs by rounding (4e-7).
        dict(local_window_size=(0, 0), T=21),
    ],
    ids=str,
)
def test_skipping_changes_no_bit(monkeypatch, kwargs):
    skipped = _forward_and_backward(**kwargs)
    visited = []
    tiles_by_mask = schedule.tiles_by_mask

    def every_tile(problem, chunk_size, operands):
        whole, edge = tiles_by_mask(problem, chunk_size, operands)
        counts = [
            math.ceil(n / side) for n, side in zip(operands.shape[1:3], chunk_size, strict=True)
        ]
        hidden = np.ones(counts, bool)
        hidden[tuple(np.concatenate([whole, edge]).T)] = False
        edge = np.concatenate([edge, np.argwhere(hidden).astype(np.int32)])
        visited.append(len(whole) + len(edge))
        return whole, edge

    monkeypatch.setattr(schedule, "tiles_by_mask", every_tile)
    jax.clear_caches()
    everything = _forward_and_backward(**kwargs)
    jax.clear_caches()
    assert len(visited) >= 2, "forward and backward did not ask"
    assert len({*visited}) == 1
    jax.tree.map(np.testing.assert_array_equal, skipped, everything)


# ---- tiles visited as it runs


def int32(*values):
    return np.array(values, np.int32)


def _kwargs_id(kwargs) -> str:
    words = []
    for name, x in kwargs.items():
        value = x.tolist() if isinstance(x, np.ndarray) else x
        words.append(f"{name}={value}")
    return ", ".join(words)


FAST_VISITS = [
    dict(is_causal=True),
    dict(key_value_seq_lengths=int32(13, 2), query_seq_lengths=int32(1, 8)),
    dict(q_offset=int32(-40, -40), is_causal=True),
    dict(q_offset=int32(3, 20), local_window_size=(4, 2), key_value_seq_lengths=int32(31, 5)),
]
SLOW_VISITS = [
    dict(key_value_seq_lengths=int32(13, 2)),
    dict(query_seq_lengths=int32(9, 17)),
    dict(key_value_seq_lengths=int32(0, 0), is_causal=True),
    dict(q_offset=int32(0, 0), is_causal=True),
    dict(q_offset=int32(60, 70), local_window_size=(9, 0)),
    dict(q_offset=int32(3, 20), local_window_size=(4, 2)),
]


@pytest.mark.parametrize("kwargs", [*FAST_VISITS, *few(SLOW_VISITS, ())], ids=_kwargs_id)
def test_tiles_visited_as_it_runs(kwargs):
    """A query tile visits the key tiles from the first to the last that any batch entry needs.

    Visits are counted in the walk, also where lengths and offsets are arrays.
    """
    T = 37
    S = 53
    t = 8
    c = 12
    visited = visits(T, S, t, c, kwargs)
    needed = set()
    for seen in _pictures(T, S, kwargs):
        needed |= needed_tiles(seen, t, c)
    assert len(visited) == len(set(visited)), "a tile is visited twice"
    assert needed <= set(visited), "a tile that sees something is not visited"
    assert set(visited) <= _without_gaps(needed), "a tile that sees nothing is visited"


def _without_gaps(tiles: set[Tile]) -> set[Tile]:
    """Return the tiles, and those between the first and the last key tile of each query tile."""
    filled = set()
    for i in {i for i, _ in tiles}:
        js = [j for row, j in tiles if row == i]
        for j in range(min(js), max(js) + 1):
            filled.add((i, j))
    return filled


def _pictures(T, S, kwargs) -> list[np.ndarray]:
    """Return who sees whom, T S, for each of two batch entries, without the library's masks."""
    rows = np.arange(T)[:, None]
    cols = np.arange(S)[None]
    pictures = []
    for b in range(2):
        position = rows + (kwargs["q_offset"][b] if "q_offset" in kwargs else 0)
        seen = np.ones((T, S), bool)
        if kwargs.get("is_causal"):
            seen &= cols <= position
        if "local_window_size" in kwargs:
            left, right = kwargs["local_window_size"]
            seen &= (position - left <= cols) & (cols <= position + right)
        if "key_value_seq_lengths" in kwargs:
            seen &= cols < kwargs["key_value_seq_lengths"][b]
        if "query_seq_lengths" in kwargs:
            seen &= rows < kwargs["query_seq_lengths"][b]
        pictures.append(seen)
    return pictures


def visits(T, S, t, c, kwargs) -> list[Tile]:
    """Return (i, j) of every tile of logits that the forward makes, as it runs."""
    visited = []

    def record(row, col):
        i = -(-int(row) // t)  # rounded up, because the last tile starts early
        j = -(-int(col) // c)
        visited.append((i, j))

    def spy(problem, tile, **options):
        jax.debug.callback(record, tile.row_start, tile.col_start)
        return tile_logits(problem, tile, **options)

    static, arrays = split(kwargs)

    @jax.jit
    def run(q, k, arrays):
        return dot_product_attention(q, k, k, chunk_size=(t, c), **static, **arrays)

    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, fixed_max):
            patch.setattr(module, "tile_logits", spy)
        jax.clear_caches()
        query = jnp.ones((2, T, 1, 2))
        key = jnp.ones((2, S, 1, 2))
        jax.block_until_ready(run(query, key, arrays))
        jax.effects_barrier()
    jax.clear_caches()
    return visited
