"""Compile and run one case with one implementation."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from memeff.bench import caches
from memeff.bench.cases import MODES, Case, array_bytes, input_arrays
from memeff.bench.device import cores, device_bytes
from memeff.bench.formatting import human
from memeff.bench.implementations import (
    array_argument,
    attention,
    causal_arguments,
    function_arguments,
    is_torch,
    why_not,
)

LOGITS_THAT_CRASH_XLA = 2**39  # SIGFPE in jax 0.12, compiling a softmax of so many for a CPU


@functools.cache
def compiled(name: str, case: Case) -> jax.stages.Compiled:
    """Compile the case from shapes alone.

    The arguments are query, key, value, the cotangent of out, and the array of `array_argument`
    where there is one. The results are (out,), or (out, dq, dk, dv), or those of `case.mode`.
    """
    if not name.startswith("memeff") and jax.default_backend() == "cpu":
        logits = case.batch * case.heads * case.queries * case.length
        if logits >= LOGITS_THAT_CRASH_XLA:
            raise MemoryError(
                "out of memory: 2^39 logits, whose softmax kills XLA (SIGFPE in jax 0.12, "
                "compiling for a CPU)"
            )
    if caches.is_cache(name):
        return jax.jit(caches.attend).lower(*caches.shapes(name, case)).compile()
    shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    extra_array = array_argument(name, case)
    if extra_array is not None:
        shapes.append(jax.eval_shape(extra_array[1]))
    array_name = extra_array[0] if extra_array else None
    call = differentiated_call(name, case, array_name)
    return jax.jit(call).lower(*shapes).compile()


def differentiated_call(name: str, case: Case, array_name: str | None) -> Callable[..., tuple]:
    """Return the function of arrays that `compiled` compiles."""
    static_arguments = causal_arguments(name, case) | function_arguments(name, case)

    def call(query: Array, key: Array, value: Array, dout: Array, *extra_array: Array) -> tuple:
        arguments = dict(static_arguments)
        if array_name is not None:
            arguments[array_name] = extra_array[0]
        attend = functools.partial(attention(name), **arguments)
        primals = (query, key, value)  # they are the directions of the tangents, too

        def gradient(*arrays: Array) -> tuple:
            _, pull = jax.vjp(attend, *arrays)
            return pull(dout)

        match case.mode:
            case "forward":
                return (attend(*primals),)
            case "gradient":
                out, pull = jax.vjp(attend, *primals)
                return out, *pull(dout)
            case "jvp":
                return jax.jvp(attend, primals, primals)
            case "hvp":
                return jax.jvp(gradient, primals, primals)
            case "grad-of-grad":
                _, pull = jax.vjp(gradient, *primals)
                return pull(primals)
        raise ValueError(f"mode {case.mode!r} is not known.")

    return call


class Run(NamedTuple):
    """A call with its inputs: `call()` starts it, and `wait(result)` waits for its end."""

    call: Callable[[], tuple]
    wait: Callable[[tuple], Any]

    def result(self) -> tuple:
        """Call once, and return the finished result: arrays in the layout B T N H."""
        result = self.call()
        self.wait(result)
        return result


def prepare(name: str, case: Case) -> Run:
    """Return the case with its inputs, ready to run.

    Raises:
      NotImplementedError: the implementation cannot run the case.
      MemoryError: the device has too little memory. A CPU's system would kill the process.
    """
    reason = why_not(name, case.dtype)
    if reason:
        raise NotImplementedError(reason)
    arrays = input_arrays(case)
    if is_torch(name):
        return prepare_torch(name, case, arrays)
    program = compiled(name, case)
    needed = array_bytes(case.shapes, case.dtype) + call_bytes(name, case)
    available = device_bytes()
    if needed > available:
        raise MemoryError(f"out of memory: needs {human(needed)} of {human(available)}")
    if caches.is_cache(name):
        query, key, value, _ = arrays
        cache = jax.jit(caches.make_cache(name, case))(key, value)
        return program_run(program, (query, jax.block_until_ready(cache)))
    extra_array = array_argument(name, case)
    if extra_array is not None:
        made = jax.jit(extra_array[1])()
        arrays = (*arrays, jax.block_until_ready(made))
    return program_run(program, arrays)


def program_run(program: jax.stages.Compiled, arrays: Sequence[Any]) -> Run:
    """Return a compiled call with its arrays."""
    return Run(functools.partial(program, *arrays), jax.block_until_ready)


def prepare_torch(name: str, case: Case, arrays: Sequence[Array]) -> Run:
    """Return the case as PyTorch runs it, on as many threads as XLA has."""
    if case.extra != "plain" or case.mode not in MODES:
        raise NotImplementedError("the bench times only its plain calls, forward and gradient")
    torch = importlib.import_module("torch")
    torch.set_num_threads(cores())
    # PyTorch's layout is B N T H.
    query, key, value, dout = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
    wants_gradient = case.mode == "gradient"
    primals = [x.detach().requires_grad_(wants_gradient) for x in (query, key, value)]
    options = causal_arguments("torch", case)
    options["enable_gqa"] = case.heads != case.kv_heads

    def backend() -> contextlib.AbstractContextManager:
        if name == "torch":
            return contextlib.nullcontext()
        attention = importlib.import_module("torch.nn.attention")
        return attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)

    def call() -> tuple:
        with backend():
            out = torch.nn.functional.scaled_dot_product_attention(*primals, **options)
        results = [out]
        if wants_gradient:
            results += torch.autograd.grad(out, primals, dout)
        return tuple(x.detach().transpose(1, 2) for x in results)

    def wait(result: tuple) -> None:
        if query.is_cuda:
            torch.cuda.synchronize()

    return Run(call, wait)


def extra_array_bytes(name: str, case: Case) -> int:
    """Return the bytes of the array that replaces the case's score or mask."""
    extra_array = array_argument(name, case)
    if extra_array is None:
        return 0
    shape = jax.eval_shape(extra_array[1])
    return shape.size * shape.dtype.itemsize


def call_bytes(name: str, case: Case) -> int:
    """Return the temporary bytes and the outputs' bytes: the least that the call takes."""
    memory: Any = compiled(name, case).memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + extra_array_bytes(name, case)


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Return (result, None), or (None, the reason in one line) if the function raises.

    An implementation that cannot run a case must not end the table.
    """
    try:
        return function(*arguments), None
    except Exception as error:  # every library has its own class for running out of memory
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" in text:
            return None, "out of memory"
        if "out of memory" in text and not isinstance(error, MemoryError):
            return None, "out of memory"
        return None, text[:100] or type(error).__name__


def ran_out(note: str | None) -> bool:
    """Return True if the note of `attempt` says that memory ran out."""
    return note is not None and note.startswith("out of memory")
