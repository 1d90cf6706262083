"""Check block masks: the tiles that they skip, and when two of them are equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import memeff
from memeff import dot_product_attention, masks
from memeff.block_mask import VisibleBlocks

f32 = np.float32


def count_visited(q, k, v, **options) -> int:
    """Return how many of 35 tiles the call visits, as `memeff.explain` says."""
    words = memeff.explain(q, k, v, **options)
    words_before, *_ = words.split(" of 35 visited")
    return int(words_before.split()[-1])


def test_block_mask_skips_the_tiles_that_its_picture_hides():
    ids = np.repeat(np.arange(4), [5, 11, 20, 17])
    mask = masks.causal() & masks.documents(ids)
    block = memeff.block_mask(mask, 53, block_size=4)
    picture = (ids[:, None] == ids) & np.tril(np.ones((53, 53), bool))
    for t, c in ((4, 4), (8, 12), (16, 4), (53, 53), (7, 13)):
        any_visible, all_visible = block.blocks.visible_tiles(t, c)
        for i, j in np.ndindex(any_visible.shape):
            tile = picture[i * t : (i + 1) * t, j * c : (j + 1) * c]
            assert any_visible[i, j] >= tile.any()
            assert all_visible[i, j] <= tile.all()
            if t % 4 == c % 4 == 0:
                assert any_visible[i, j] == tile.any()
                assert all_visible[i, j] == tile.all()
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.standard_normal((3, 1, 53, 2, 4)), f32)

    def out_and_gradients(mask):
        f = functools.partial(dot_product_attention, mask_fn=mask, chunk_size=(8, 12))
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(jnp.cos(out))

    expected = jax.jit(functools.partial(out_and_gradients, mask))()
    actual = jax.jit(functools.partial(out_and_gradients, block))()
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    visited = count_visited(q, k, v, mask_fn=block, chunk_size=(8, 12))
    any_visible, _ = block.blocks.visible_tiles(8, 12)
    assert visited == any_visible.sum() < 35


def test_block_mask_of_batch_and_heads():
    """A tile is visited where some batch entry and head sees something."""
    lengths = jnp.array([3, 30])
    block = memeff.block_mask(masks.prefix(lengths), 8, 64, batch=2, block_size=8)
    assert block.blocks.any_visible.tolist() == [[True] * 4 + [False] * 4]
    assert not block.blocks.all_visible.any()

    def later_for_each_head(batch, head, q_pos, k_pos, params):
        return k_pos >= 8 * head

    per_head = memeff.block_mask(later_for_each_head, 8, 32, heads=3, block_size=8)
    assert per_head.blocks.any_visible.all()
    assert per_head.blocks.all_visible.tolist() == [[False, False, True, True]]
    assert per_head.sparsity == 0


def test_block_masks_are_equal_by_what_they_say():
    def blocks(window):
        return memeff.block_mask(masks.sliding_window(window), 64, block_size=8).blocks

    assert blocks(8) == blocks(8)
    assert hash(blocks(8)) == hash(blocks(8))
    assert blocks(8) != blocks(9)
    assert isinstance(blocks(8), VisibleBlocks)


def test_a_block_mask_of_numpy_arrays_is_made_inside_jit():
    def any_visible():
        documents = masks.documents(np.arange(8) // 3)
        block = memeff.block_mask(masks.causal() & documents, 8, block_size=2)
        return block.blocks.any_visible

    @jax.jit
    def inside(x):
        return x + any_visible()

    np.testing.assert_array_equal(inside(0), any_visible())


def test_positions_wrap_in_a_block_mask_as_in_a_tile():
    """With x64 a mask_fn gets int32 positions too, so a number beyond 2^31 wraps in both."""

    def wraps(batch, head, q_pos, k_pos, params):
        return (q_pos << 30) << 2 == 0  # True in int32; in 64 bits of the first query alone

    with jax.enable_x64(True):
        block = memeff.block_mask(wraps, 8, block_size=2)
    assert block.blocks.all_visible.all()
