"""Sketch the forward for Blackwell GPUs: Mosaic's `tcgen05` products, with sums in tensor memory.

No part of memeff runs it. test_tcgen05.py runs it in Mosaic's interpreter, and compiles it for an
absent B200 by `python tests/tcgen05_sketch.py`. Nobody has run it on a GPU.

A thread block has two tiles of 128 queries. One warp copies keys and values, one starts products,
and a warpgroup for each tile computes its softmax. Tensor memory has 512 columns of 128 rows: of
each tile 128 for its logits s, in whose place p comes, and H for o. While a warpgroup makes p of
its tile, the tensor cores multiply for the other.

As in the Hopper kernels the reference of a row is its maximum in the first tile of keys. So o is
scaled once, at the end, and nobody reads it before. Rows that fail are not found here.
"""

import functools
from typing import Any, NamedTuple

from described_h200 import set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import Array, lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

TILE = 128  # queries, and keys
GROUPS = 2  # tiles of queries of a thread block
STAGES = 2  # tiles of keys, and of values, in shared memory
LOG2_E = 1.4426950408889634
COPIES, PRODUCTS = 0, 1  # warps of the first warpgroup


class Barriers(NamedTuple):
    """What the warps wait for, one barrier for each tile of queries or slot."""

    q_here: Any
    k_here: Any
    v_here: Any
    k_free: Any
    v_free: Any
    s_here: Any
    p_here: Any
    p_free: Any
    o_here: Any


def forward(query: Array, key: Array, value: Array, scale: float, **options) -> Array:
    """Return out [B, T, N, H] for query, key and value [B, T, N, H], all of 16 bits, H <= 128.

    T is a multiple of 256. `options` are those of `plgpu.kernel`.
    """
    B, T, N, H = query.shape
    steps = T // TILE
    dtype = query.dtype

    def block(query, key, value, out, q, k, v, logits, sums, barriers):
        b, n, i = (lax.axis_index(axis) for axis in ("batch", "head", "tile"))
        warpgroup = lax.axis_index("warpgroup")

        def tokens(tile):
            return b, pl.ds(tile * TILE, TILE), n

        def copy():
            for group in range(GROUPS):
                source = query.at[tokens(GROUPS * i + group)]
                plgpu.copy_gmem_to_smem(source, q.at[group], barriers.q_here.at[group])

            def step(j, _):
                slot = lax.rem(j, STAGES)
                for source, target, here, free in (
                    (key, k, barriers.k_here, barriers.k_free),
                    (value, v, barriers.v_here, barriers.v_free),
                ):

                    @pl.when(j >= STAGES)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    source = source.at[tokens(j)]
                    plgpu.copy_gmem_to_smem(source, target.at[slot], here.at[slot])

            lax.fori_loop(0, steps, step, None)

        def multiply():
            def query_key(j, group):
                slot = lax.rem(j, STAGES)
                if group == 0:
                    plgpu.barrier_wait(barriers.k_here.at[slot])
                k_transposed = k.at[slot].transpose((1, 0))
                s, _ = logits[group]
                done = barriers.k_free.at[slot]
                plgpu.tcgen05_mma(s, q.at[group], k_transposed, done, accumulate=False)
                plgpu.tcgen05_commit_arrive(barriers.s_here.at[group])

            for group in range(GROUPS):
                plgpu.barrier_wait(barriers.q_here.at[group])
                query_key(0, group)

            def step(j, _):
                slot = lax.rem(j, STAGES)
                plgpu.barrier_wait(barriers.v_here.at[slot])
                for group in range(GROUPS):
                    plgpu.barrier_wait(barriers.p_here.at[group])
                    _, p = logits[group]
                    done = barriers.v_free.at[slot]
                    plgpu.tcgen05_mma(sums[group], p, v.at[slot], done, accumulate=j > 0)
                    plgpu.tcgen05_commit_arrive(barriers.p_free.at[group])

                    @pl.when(j + 1 < steps)
                    def _(group=group):
                        # PTX orders products of the same accumulator only
                        plgpu.barrier_wait(barriers.p_free.at[group])
                        query_key(j + 1, group)

            lax.fori_loop(0, steps, step, None)
            plgpu.tcgen05_commit_arrive(barriers.o_here)

        def softmax(group: int):
            s, p = logits[group]

            def rows(x):
                return lax.broadcast_in_dim(x, (TILE, TILE), (0,))

            def load():
                return plgpu.async_load_tmem(s) * (scale * LOG2_E)

            plgpu.barrier_wait(barriers.s_here.at[group])
            m = load().max(1)

            def step(j, l):
                @pl.when(j > 0)
                def _():
                    plgpu.barrier_wait(barriers.s_here.at[group])

                probabilities = jnp.exp2(load() - rows(m))
                plgpu.wait_load_tmem()  # p is written over s
                plgpu.async_store_tmem(p, probabilities.astype(dtype))
                plgpu.commit_tmem()
                plgpu.barrier_arrive(barriers.p_here.at[group])
                return l + probabilities.sum(1)

            l = lax.fori_loop(0, steps, step, jnp.zeros((TILE,), jnp.float32))
            plgpu.barrier_wait(barriers.o_here)
            o = plgpu.async_load_tmem(sums[group])
            o = o / lax.broadcast_in_dim(l, (TILE, H), (0,))
            q[group] = o.astype(dtype)  # no product reads the queries any more
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q.at[group], out.at[tokens(GROUPS * i + group)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == GROUPS)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp == COPIES)(copy)
                pl.when(warp == PRODUCTS)(multiply)

        for group in range(GROUPS):
            pl.when(warpgroup == group)(functools.partial(softmax, group))

    return plgpu.kernel(
        block,
        out_type=query,
        grid=(B, N, T // (GROUPS * TILE)),
        grid_names=("batch", "head", "tile"),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        kernel_name="tcgen05_forward",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        scratch_types=_scratch(H, dtype),
        **options,
    )(query, key, value)


def _scratch(H: int, dtype) -> dict[str, Any]:
    """Return the types of a thread block's shared memory, tensor memory and barriers."""
    swizzle = plgpu.find_swizzle(16 * H)
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)

    def tiles(count: int):
        return plgpu.SMEM((count, TILE, H), dtype, transforms=transforms)

    def logits():
        s = plgpu.TMEM((TILE, TILE), jnp.float32)
        return plgpu.RefUnion(s, plgpu.TMEM((TILE, TILE), dtype, packed=True))

    copied = plgpu.Barrier
    ordered = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    return dict(
        q=tiles(GROUPS),
        k=tiles(STAGES),
        v=tiles(STAGES),
        logits=[logits() for _ in range(GROUPS)],
        sums=[plgpu.TMEM((TILE, H), jnp.float32) for _ in range(GROUPS)],
        barriers=Barriers(
            q_here=copied(num_barriers=GROUPS),
            k_here=copied(num_barriers=STAGES),
            v_here=copied(num_barriers=STAGES),
            k_free=ordered(num_arrivals=GROUPS, num_barriers=STAGES),
            v_free=ordered(num_arrivals=GROUPS, num_barriers=STAGES),
            s_here=ordered(num_barriers=GROUPS),
            p_here=ordered(num_barriers=GROUPS),
            p_free=ordered(num_barriers=GROUPS),
            o_here=ordered(),
        ),
    )


def main() -> None:
    """Compile a forward for a B200. With MOSAIC_GPU_DUMP_PTX=1 Mosaic prints its assembly."""
    from described_gpus import described

    x = jax.ShapeDtypeStruct((2, 8192, 16, 128), "bfloat16")
    with described("sm_100") as mesh:
        here = NamedSharding(mesh, PartitionSpec())
        call = functools.partial(forward, scale=128**-0.5)
        jax.jit(call, in_shardings=here, out_shardings=here).trace(x, x, x).lower().compile()


if __name__ == "__main__":
    main()
