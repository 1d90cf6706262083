"""Write the table of docs/kernels.md that says what each family of kernels runs.

python tests/kernel_table.py            # prints it
python tests/kernel_table.py --write    # puts it into the page

The reasons are those of `why_not`, which decides what runs.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

import memeff
from memeff import implementations, pallas
from memeff.arguments import bind_arguments
from memeff.device import Device, current_device, pretend_device
from memeff.diagnostics.bind import prepare_shapes
from memeff.implementations import Request

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN = "<!-- written by tests/kernel_table.py -->\n"
END = "<!-- end of the table of families -->\n"
DEVICES = {"Hopper": Device("gpu", "9.0"), "Ampere": Device("gpu", "8.0"), "TPU": Device("tpu")}
RUNS = "forward, backward"
B = 2
T = 256
N = 4
KERNELS_JAX = (0, 11, 2)  # which has all kernels, whatever runs this script


class Row(NamedTuple):
    title: str
    kwargs: dict[str, Any] = {}
    T: int = T
    K: int = N
    H: int = 128
    D: int = 128
    dtype: str = "bfloat16"
    request: Request = Request()


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def ids(length: int):
    return array(B, length, dtype="int32")


def rows() -> Iterator[Row]:
    """Yield a row for each argument, and for each property of query, key and value."""
    yield Row("query, key, value in bfloat16")
    yield Row("in float16", dtype="float16")
    yield Row("in float32", dtype="float32")
    yield Row('in float32, `precision="highest"`', {"precision": "highest"}, dtype="float32")
    yield Row("heads of 97", H=97, D=97)
    yield Row("heads of 192, values of 128", H=192)
    yield Row("heads of 257", H=257, D=257)
    yield Row("grouped heads", K=2)
    yield Row("8 queries", T=8)
    yield Row("`bias`", {"bias": array(N, T, T, dtype="bfloat16")})
    yield Row("`mask` of keys", {"mask": array(B, 1, 1, T, dtype="bool")})
    yield Row("`mask` of queries", {"mask": array(B, 1, T, 1, dtype="bool")})
    yield Row("`mask`, dense", {"mask": array(T, T, dtype="bool")})
    yield Row("`scale`, a number", {"scale": 0.3})
    yield Row("`scale`, an array", {"scale": array()})
    yield Row("`is_causal`", {"is_causal": True})
    yield Row("`query_seq_lengths`", {"query_seq_lengths": array(B, dtype="int32")})
    yield Row("`key_value_seq_lengths`", {"key_value_seq_lengths": array(B, dtype="int32")})
    yield Row("`local_window_size`", {"local_window_size": (100, 20)})
    segments = {"query_segment_ids": ids(T), "key_value_segment_ids": ids(T)}
    yield Row("`query_segment_ids`, `key_value_segment_ids`", segments)
    mask = array(B, 1, 1, T, dtype="bool")
    yield Row("segment ids with a `mask` of keys", segments | {"mask": mask})
    yield Row("`q_offset`, a number", {"q_offset": 5, "is_causal": True})
    yield Row("`q_offset`, an array", {"q_offset": array(B, dtype="int32"), "is_causal": True})
    yield Row("`logits_soft_cap`, a number", {"logits_soft_cap": 20.0})
    yield Row("`logits_soft_cap`, an array", {"logits_soft_cap": array()})
    yield Row("`sinks`", {"sinks": array(N)})
    dropout = {"dropout_rng": array(2, dtype="uint32"), "dropout_rate": 0.1}
    yield Row("`dropout_rng`, `dropout_rate`", dropout)
    yield Row('the same with `dropout_bits="mix32"`', dropout | {"dropout_bits": "mix32"})
    yield Row("`score_fn`", {"score_fn": memeff.scores.soft_cap(20.0)})
    yield Row("`mask_fn`", {"mask_fn": memeff.masks.causal()})
    yield Row("`qk_transform`", {"qk_transform": memeff.transforms.rotary()})
    yield Row('`precision="highest"`', {"precision": "highest"})
    yield Row("`chunk_size`", request=Request(chunk_size=(64, 64)))
    yield Row('`backward="fused"`', request=Request(backward="fused"))


def prepared(row: Row):
    """Return the prepared call of a row."""
    query = array(B, row.T, N, row.H, dtype=row.dtype)
    key = array(B, T, row.K, row.H, dtype=row.dtype)
    value = array(B, T, row.K, row.D, dtype=row.dtype)
    return prepare_shapes("plan", bind_arguments("plan", query, key, value, **row.kwargs))


def cell(row: Row, name: str, device: Device) -> str:
    """Return what implementation `name` runs of a call, or the reason why it runs none."""
    with pretend_device(*device):
        call = prepared(row)
        problem, operands = call.chosen.problem, call.operands
        reason = implementations.why_not(name, problem, operands, row.request)
        if reason is not None:
            return reason
        if name != "pallas":
            return RUNS
        family = pallas.family_for(current_device())
        slower = family.slower(problem, operands)
        runs = (
            RUNS if family.backward_is_kernel(operands) else "forward; the chunked path, backward"
        )
        return runs if slower is None else f"{runs}; slower: {slower}"


def table() -> str:
    """Return the table in Markdown."""
    names = [*DEVICES, "chunked"]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    with mock.patch.object(jax, "__version_info__", KERNELS_JAX):
        for row in rows():
            cells = [cell(row, "pallas", device) for device in DEVICES.values()]
            cells.append(cell(row, "xla", Device("cpu")))
            lines.append(f"| {' | '.join([row.title, *cells])} |")
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """Return the page with `text` in the place of its table."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(table()))
    else:
        print(table(), end="")
