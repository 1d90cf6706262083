"""`python -m memeff.bench devices`: measure causal attention over a sharded sequence.

Each of --devices devices has --tokens tokens of the sequence. Each row is compared with one device
that has the whole sequence, in the same run. The share of a row is the time of that device, divided
by the number of devices and by the time of the row. The share of own is the rate of a device in the
row, over that of a device that is alone with its own tokens: the time of `own`, times the number of
devices, divided by the time of the row. The error is the largest difference of out and of all
gradients from those of one device, over the largest number of each. Unless XLA_FLAGS sets it
otherwise, copy engines carry the messages of GPUs (--xla_gpu_collective_permute_mode=peer).

  one                 memeff on one device
  own                 memeff on one device, with the tokens of one device
  ring, all_gather, all_to_all
                      memeff with this context_parallel, in a zigzag
  two_axes            memeff with all-to-all in pairs of devices, and a ring of two or more pairs
  jax.nn:all_gather   jax.nn with cuDNN (on a CPU, XLA) on gathered keys. The causal order of a part
                      is a dense mask there, because jax.nn has no offset
  jla:ring            context_parallel_attention of jax-linear-attention, which makes the zigzag
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

import memeff
from memeff.bench.cases import Row
from memeff.bench.options import (
    add_dtype,
    add_measuring_options,
    add_output,
    add_size,
    new_parser,
    picture_file,
)
from memeff.bench.plots import devices_figure, save_figure
from memeff.bench.programs import (
    check_known,
    compile_all,
    measuring_command,
    record_table,
    timed_rows,
)
from memeff.bench.results import read_results, results_markdown
from memeff.bench.tables import TIMED_MODES
from memeff.device import set_copied_messages

SECONDS_PER_SAMPLE = 0.1
AXIS = "seq"
PAIRS = ("ring", "heads")  # the axes of two_axes: a ring of pairs of devices
STRATEGIES = ("ring", "all_gather", "all_to_all", "two_axes")
ALONE = ("one", "own")  # on one device
STANDARD = (*ALONE, *STRATEGIES, "jax.nn:all_gather", "jla:ring")
Attention = Callable[[Array, Array, Array], Array]


class DevicesCase(NamedTuple):
    """The sizes of a call: `tokens` are those of one device, of one sequence."""

    devices: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def length(self) -> int:
        """Return the tokens of the whole sequence."""
        return self.tokens * self.devices

    def shapes(self, name: str = "one") -> list[tuple[int, ...]]:
        """Return the shapes of query, key, value and the cotangent of out for an implementation."""
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        length = self.tokens if name == "own" else self.length
        return [(1, length, n, self.head_dim) for n in heads]


def make_mesh(name: str, count: int) -> Mesh:
    """Return a mesh of `count` devices along the sequence, for the implementation `name`."""
    shape, axes = ((count // 2, 2), PAIRS) if name == "two_axes" else ((count,), (AXIS,))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[:count])


def mesh_and_sharding(name: str, count: int) -> tuple[Mesh | None, Sharding]:
    """Return the mesh of an implementation, and how query, key and value lie on it."""
    if name in ALONE:
        return None, SingleDeviceSharding(jax.devices()[0])
    mesh = make_mesh(name, count)
    return mesh, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))


def attention(name: str, mesh: Mesh | None) -> Attention:
    """Return the causal attention called `name` of whole arrays."""
    check_known(name, STANDARD)
    if name in ALONE:
        return functools.partial(memeff.dot_product_attention, is_causal=True)
    if name == "jla:ring":
        module = importlib.import_module("jla.distributed.context_parallel_attention")
        return functools.partial(module.context_parallel_attention, mesh=mesh, axis=AXIS)
    assert mesh is not None
    part = jax_nn_of_gathered_keys
    if name in STRATEGIES:
        two = name == "two_axes"
        part = functools.partial(
            memeff.dot_product_attention,
            is_causal=True,
            sequence_axis=PAIRS if two else AXIS,
            sequence_layout="zigzag",
            context_parallel="all_to_all" if two else name,
        )
    spec = PartitionSpec(None, mesh.axis_names)
    return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)


def jax_nn_of_gathered_keys(query: Array, key: Array, value: Array) -> Array:
    """Return jax.nn's attention of this device's queries over the keys of all devices."""
    keys = [lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (key, value)]
    T, S = query.shape[1], keys[0].shape[1]
    rows = lax.axis_index(AXIS) * T + jnp.arange(T)
    mask = rows[:, None] >= jnp.arange(S)
    library = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, *keys, mask=mask[None, None], implementation=library)


def compiled(name: str, case: DevicesCase, mode: str) -> jax.stages.Compiled:
    """Compile a call from its shapes."""
    mesh, sharding = mesh_and_sharding(name, case.devices)
    attend = attention(name, mesh)

    def run(query, key, value, dout):
        if mode == TIMED_MODES[0]:
            return (attend(query, key, value),)
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(dout)

    shapes = [jax.ShapeDtypeStruct(x, case.dtype, sharding=sharding) for x in case.shapes(name)]
    jitted = jax.jit(run, out_shardings=sharding)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return jitted.lower(*shapes).compile()


def draw(case: DevicesCase) -> list[Array]:
    """Return normal numbers, on one device."""
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    shapes = case.shapes()
    return [normal(key, x, jnp.dtype(case.dtype)) for key, x in zip(keys, shapes, strict=True)]


def in_order_of(name: str, count: int, x: Array, back: bool = False) -> Array:
    """Return tokens in the order of a call on `count` devices; with `back`, undo that."""
    if name not in STRATEGIES:
        return x
    reorder = memeff.from_zigzag if back else memeff.to_zigzag
    return reorder(x, make_mesh(name, count).devices.shape[0], axis=1)


def largest_error(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference of any result, over the largest number of that result."""

    @jax.jit
    def relative(x, y):
        x, y = (z.astype(jnp.float32) for z in (x, y))
        return jnp.abs(x - y).max() / jnp.abs(y).max()

    device = jax.devices()[0]
    pairs = zip(jax.device_put(actual, device), expected, strict=True)
    return max(float(relative(x, y)) for x, y in pairs)


def devices_rows(
    cases: Sequence[DevicesCase], names: Sequence[str], rounds: int, jobs: int
) -> Iterator[Row]:
    """Yield a row for each case and implementation; `jobs` programs are compiled at a time."""
    calls = []
    for case in cases:
        pairs = case.devices % 2 == 0 and case.devices > 2
        names_of_case = [name for name in names if pairs or name != "two_axes"]
        calls += itertools.product(names_of_case, [case], TIMED_MODES)
    programs = compile_all(compiled, calls, jobs)
    for case in cases:
        yield from _rows_of_case(case, programs, rounds)


def _rows_of_case(case: DevicesCase, programs: dict[Any, Any], rounds: int) -> list[Row]:
    """Return a row for each implementation, whose programs are timed in turns."""
    arrays = draw(case)
    expected: list[Array] = []  # the results of `one`, which comes first

    def inputs(name):
        _, sharding = mesh_and_sharding(name, case.devices)
        parts = [x[:, : case.tokens] for x in arrays] if name == "own" else arrays
        ordered = [in_order_of(name, case.devices, x) for x in parts]
        return jax.device_put(ordered, sharding)

    def error(name, mode, results):
        if mode == TIMED_MODES[0] or name == "own":
            return {}
        results = [in_order_of(name, case.devices, x, back=True) for x in results]
        if name == "one":
            expected[:] = results
        return {"error": largest_error(results, expected)} if expected else {}

    rows, samples = timed_rows(
        case, programs, inputs, error, rounds=rounds, at_least=SECONDS_PER_SAMPLE
    )
    for mode, seconds_by_name in samples.items():
        for name, seconds in seconds_by_name.items():
            scales = {"share": ("one", 1 / case.devices), "share of own": ("own", case.devices)}
            for field, (alone, scale) in scales.items():
                if name not in ALONE and alone in seconds_by_name:
                    turns = zip(seconds_by_name[alone], seconds, strict=True)
                    shares = [scale * x / other for x, other in turns]
                    rows[name][f"{mode}: {field}"] = statistics.median(shares)
    return list(rows.values())


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(arguments)
    if options.results:
        path = Path(options.results)
        results = read_results(path.parent, path.stem)
        rows = results.rows
        print(results_markdown(results))
    else:
        command = measuring_command(["devices", *arguments])
        rows = record_table(asked_rows(options), command, options.save, "devices")
    if options.plot:
        save_figure(devices_figure(rows), options.plot)


def asked_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of the table that the options ask for, which come case by case."""
    set_copied_messages()
    counts = options.devices or [jax.device_count()]
    if max(counts) > jax.device_count():
        sys.exit(
            f"--devices {max(counts)}: this machine has {jax.device_count()}. Give fewer. For a "
            f"trial on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={max(counts)}."
        )
    cases = []
    for count, length in itertools.product(counts, options.tokens):
        heads = options.heads, options.kv_heads or options.heads
        cases.append(DevicesCase(count, length, *heads, options.head_dim, options.dtype))
    names = [*ALONE, *(name for name in options.implementation if name not in ALONE)]
    return devices_rows(cases, names, options.rounds, options.jobs)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("devices", __doc__)
    add_size(parser, "--devices", "P", "how many devices (default: all)", several=True)
    add_size(parser, "--tokens", "T", "tokens of one device", [8192])
    add_size(parser, "--heads", "N", "query heads", 16)
    add_size(parser, "--kv-heads", "K", "key/value heads (default: N)")
    add_size(parser, "--head-dim", "H", "head size", 128)
    add_dtype(parser, "bfloat16")
    add_measuring_options(parser, STANDARD, rounds=5)
    help = "show results that were saved; nothing is measured"
    parser.add_argument("--results", metavar="FILE", help=help)
    plot = "draw the shares against the number of devices"
    add_output(parser, "--plot", plot, picture_file)
    return parser.parse_args(arguments)
