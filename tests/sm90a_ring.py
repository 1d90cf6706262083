"""Compile a ring for H200s, without a GPU, and print how its messages stand beside its work.

test_sm90a.py runs this file. A line: mode, devices, temporary bytes of a device, bytes that XLA's
own passes read and write, whether an array as long as the sequence exists, how many slices a kernel
reads in place, how many of them begin where kernels refuse it, and the schedule: S (a message
starts), D (it is there), W (a kernel), P (a message that nothing hides).
"""

import math
import re

from described_h200 import mesh_of, set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

import memeff  # noqa: E402
from memeff.device import pretend_device  # noqa: E402
from memeff.sequence.messages import ALIGNMENT  # noqa: E402

L = 8192  # tokens of a device


def compiled(devices: int, gradient: bool):
    """Return the program of one device: causal, zigzag, 16 heads of 128, bfloat16."""
    mesh = mesh_of(devices, "seq")
    x = jax.ShapeDtypeStruct((1, devices * L, 16, 128), "bfloat16")

    def attend(q, k, v):
        return memeff.dot_product_attention(
            *(q, k, v),
            is_causal=True,
            sequence_axis="seq",
            sequence_layout="zigzag",
            context_parallel="ring",
        )

    def attend_with_gradient(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    tokens = PartitionSpec(None, "seq")
    run = attend_with_gradient if gradient else attend
    with jax.set_mesh(mesh), pretend_device("gpu", "9.0"):
        run = jax.shard_map(run, mesh=mesh, in_specs=tokens, out_specs=tokens)
        return jax.jit(run).lower(*[x] * (4 if gradient else 3)).compile()


def schedule(text: str) -> str:
    """Return the messages and kernels of a program in the order in which they run."""
    signs = {
        "S": r"collective-permute-start\(",
        "D": r"collective-permute-done\(",
        "P": r"collective-permute\(",
        # XLA puts the slices that a kernel reads into a fusion with it
        "W": r"custom_call_target=\"mosaic_gpu|kind=kCustom",
    }
    found = []
    for line in text[text.index("\nENTRY") :].splitlines():
        found.extend(sign for sign, pattern in signs.items() if re.search(pattern, line))
    return "".join(found)


BYTES = {"bf16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
FREE = "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "partition-id"


def bytes_of(shapes: str) -> int:
    """Return the bytes of all arrays in the text of a type."""
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += BYTES.get(dtype, 0) * math.prod(int(size) for size in dims.split(",") if size)
    return total


def bytes_outside_kernels(text: str) -> int:
    """Return how many bytes XLA's passes read and write at most, without kernels and messages."""
    sizes = {}
    total = 0
    instruction = r"^ +(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$"
    for name, shapes, operation, rest in re.findall(
        instruction, text[text.index("\nENTRY") :], flags=re.MULTILINE
    ):
        sizes[name] = bytes_of(shapes)
        is_kernel = "mosaic_gpu" in rest or "kind=kCustom" in rest
        if operation in FREE or "collective-permute" in operation or is_kernel:
            continue
        if sizes[name] <= 64:  # a few numbers, of which a slice may be read from a large array
            continue
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        read = [sizes.get(operand, 0) for operand in operands]
        written = sizes[name]
        if "dynamic_update_slice" in name:  # the rest of the array stays where it is
            read.remove(written)
            written = sum(read)
        elif name.startswith("wrapped_slice"):
            read = [written]
        total += sum(read) + written
    return total


def slices_in_kernels(text: str) -> list[int]:
    """Return at which byte of its array each slice begins that a kernel reads in place."""
    starts = []
    for fusion in re.findall(r"^%dynamic-slice-fusion.*?^\}", text, re.M | re.S):
        shapes = {}
        for name, dtype, dims in re.findall(r"%(\S+) = (\w+)\[([\d,]*)\]", fusion):
            shapes[name] = dtype, [int(size) for size in dims.split(",") if size]
        for name, bounds in re.findall(r" slice\(%([\w.-]+)\), slice=\{(.*?)\}", fusion):
            dtype, dims = shapes[name]
            first = [int(start) for start in re.findall(r"\[(\d+):", bounds)]
            words = sum(n * math.prod(dims[dim + 1 :]) for dim, n in enumerate(first))
            starts.append(words * BYTES[dtype])
    return starts


if __name__ == "__main__":
    for devices, gradient in ((2, False), (2, True), (4, False), (4, True), (8, True)):
        program = compiled(devices, gradient)
        text = program.as_text()
        starts = slices_in_kernels(text)
        print(
            "gradient" if gradient else "forward",
            devices,
            program.memory_analysis().temp_size_in_bytes,
            bytes_outside_kernels(text),
            f"[1,{devices * L},16,128]" in text,
            len(starts),
            sum(start % ALIGNMENT > 0 for start in starts),
            schedule(text),
            flush=True,
        )
