r"""Trains the byte-level language model of `models.transformer`; the same command again resumes an interrupted run.

    python -m models.train                          # Python's own library, 4,096 bytes of context, CPU or GPU
    python -m models.train --text book.txt folder/  # any text
    python -m models.train --attention jax.nn --out runs/other   # the same data, attention by somebody else
    python -m models.train --task listops --context 2048         # a long-range task: nested MIN, MAX, MED, SM

The first, on two CPU cores: 4,900 tokens/s; evaluation loss near 2.40 nats per byte after 50 steps (50 s), 2.24 after 200.

Everything lands in --out: metrics.jsonl (one line per step), checkpoints/, run.json (the settings).
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array, lax

from models.data import Batch, ListOps, Refused, Task, Text
from models.transformer import Config, Transformer


@dataclasses.dataclass(frozen=True)
class Settings(Config):
    """All that a run is made of. `python -m models.train --help` is this list."""

    out: Annotated[str, "folder of the run"] = "runs/train"
    task: Annotated[Literal["text", "listops"], "what is learnt"] = "text"
    text: Annotated[tuple[str, ...], "text files or folders (default: Python's own library)"] = ()
    context: Annotated[int, "tokens in a row"] = 4096
    batch: Annotated[int, "rows in a step"] = 1
    accumulate: Annotated[int, "pieces that a step's rows are worked off in, one after the other"] = 1
    steps: Annotated[int, "steps of the whole run"] = 200
    learning_rate: Annotated[float, "at the top of the schedule"] = 3e-3
    warmup: Annotated[int, "steps from 0 to the top; from there a cosine down to a tenth"] = 20
    weight_decay: Annotated[float, "of AdamW, on matrices"] = 0.1
    clip: Annotated[float, "largest global norm of the gradient"] = 1.0
    eval_every: Annotated[int, "steps between evaluations"] = 50
    eval_batches: Annotated[int, "batches in an evaluation"] = 4
    save_every: Annotated[int, "steps between checkpoints"] = 50
    log_every: Annotated[int, "steps between printed lines"] = 10
    minutes: Annotated[float | None, "save and stop after so long, as if interrupted"] = None
    seed: Annotated[int, "of parameters and data"] = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("context", "batch", "accumulate", "steps", "eval_every", "eval_batches", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise Refused(f"{name}={getattr(self, name)}: it must be at least 1.")
        if self.batch % self.accumulate:
            raise Refused(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}.")
        if not 0 <= self.warmup < self.steps:
            raise Refused(f"warmup={self.warmup} must be >= 0 and less than steps={self.steps}.")


# What may differ between a run and its resumption: none of it changes what is computed.
FREE = {"out", "remat", "scan_layers", "attention", "eval_every", "save_every", "log_every", "minutes"}


def main(arguments: list[str] | None = None) -> None:
    try:
        settings = parse(arguments)
        finished = train(settings)
    except Refused as refusal:
        raise SystemExit(f"models.train: {refusal}") from None
    if not finished:
        raise SystemExit("models.train: stopped early and saved; the same command resumes where it was.")


def train(settings: Settings) -> bool:
    """Runs or resumes; False if it was stopped (signal, `minutes`) before its last step."""
    task = open_task(settings)
    check_same_run(settings, str(task))
    model = Transformer(settings, rngs=nnx.Rngs(settings.seed))
    graphdef, params = nnx.split(model, nnx.Param)
    state = params, make_optimiser(settings).init(params)
    with checkpoints(settings.out) as manager, stop_signals() as stopped, Log(settings) as log:
        first = manager.latest_step() or 0
        if first:
            state = restore(manager, first, state)
        size = sum(x.size for x in jax.tree.leaves(params))
        log.begin(first, f"{task}; {size:,} parameters; {settings.attention} on {jax.devices()[0].device_kind}")
        started = time.perf_counter()
        for step in range(first, settings.steps):
            state, metrics = train_step(settings, graphdef, state, task.train_batch(settings.seed, step))
            log.step(step + 1, metrics)
            late = settings.minutes is not None and time.perf_counter() - started > 60 * settings.minutes
            stop = late or stopped()
            last = step + 1 == settings.steps
            if last or (step + 1) % settings.eval_every == 0:
                log.evaluation(step + 1, evaluate(settings, graphdef, state[0], task))
            if last or stop or (step + 1) % settings.save_every == 0:
                save(manager, step + 1, state)
            if stop and not last:
                return False
    return True


# ---- a step


def make_optimiser(settings: Settings) -> optax.GradientTransformation:
    peak = settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, settings.warmup, settings.steps, 0.1 * peak)

    def matrices(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=matrices),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(settings: Settings, graphdef: Any, state: tuple, batch: Batch) -> tuple[tuple, dict[str, Array]]:
    """The state (parameters, optimiser's) after one more batch, and what was measured on the way."""
    params, optimiser_state = state
    (loss, accuracy), gradient = loss_and_gradient(graphdef, params, batch, settings.accumulate)
    updates, optimiser_state = make_optimiser(settings).update(gradient, optimiser_state, params)
    metrics = {"loss": loss, "accuracy": accuracy, "gradient_norm": optax.tree.norm(gradient)}
    return (optax.apply_updates(params, updates), optimiser_state), metrics


def loss_and_gradient(graphdef: Any, params: Any, batch: Batch, accumulate: int) -> tuple[tuple[Array, Array], Any]:
    """(loss, accuracy) of a batch and the gradient of its loss, in `accumulate` pieces; the same numbers for any."""
    total = jnp.sum(batch.weights)
    gradient = jax.value_and_grad(lambda params, piece: loss_sum(graphdef, params, piece, total), has_aux=True)

    def add(so_far, piece):
        return jax.tree.map(jnp.add, so_far, gradient(params, piece)), None

    pieces = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    zero = jax.tree.map(jnp.zeros_like, ((total, total), params))
    sums, _ = lax.scan(add, zero, pieces)
    return sums


@functools.partial(jax.jit, static_argnums=0)
def loss_sum(graphdef: Any, params: Any, batch: Batch, total: Array | float) -> tuple[Array, Array]:
    """What the batch adds to the mean loss (nats per predicted token) and to the accuracy of a whole of weight `total`."""
    tokens = batch.tokens.astype(jnp.int32)  # B T+1
    seen, wanted = tokens[:, :-1], tokens[:, 1:]
    segment_ids = jnp.cumsum(seen == 0, axis=1)  # byte 0 starts a document
    logits = nnx.merge(graphdef, params)(seen, segment_ids)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), wanted)
    right = jnp.argmax(logits, axis=-1) == wanted
    return jnp.sum(losses * batch.weights) / total, jnp.sum(right * batch.weights) / total


def evaluate(settings: Settings, graphdef: Any, params: Any, task: Task) -> dict[str, float]:
    """Means over the same `eval_batches` batches each time."""
    batches = [task.eval_batch(i) for i in range(settings.eval_batches)]
    sums = [loss_sum(graphdef, params, batch, 1.0) for batch in batches]
    loss, accuracy = np.sum(sums, axis=0) / sum(batch.weights.sum() for batch in batches)
    return {"eval_loss": float(loss), "eval_accuracy": float(accuracy)}


# ---- settings


def parse(arguments: list[str] | None) -> Settings:
    """Settings from the command line: a flag for each field, its type and its default."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(Settings, include_extras=True)
    for field in dataclasses.fields(Settings):
        kind, text = get_args(hints[field.name])
        if get_origin(kind) in (Union, types.UnionType):  # int | None
            kind = get_args(kind)[0]
        how: dict[str, Any] = {"type": kind}
        if get_origin(kind) is Literal:
            how = {"choices": get_args(kind)}
        elif get_origin(kind) is tuple:
            how = {"nargs": "+", "metavar": "PATH"}
        elif kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        shown = text if field.default in (None, ()) else f"{text} (default: {field.default})"
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, help=shown, **how)
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    values["text"] = tuple(values["text"])
    return Settings(**values)


def open_task(settings: Settings) -> Task:
    if settings.task == "listops":
        return ListOps(settings.context, settings.batch)
    return Text(settings.text, settings.context, settings.batch)


def check_same_run(settings: Settings, data: str) -> None:
    """Writes run.json, or refuses to resume a run that had other settings or data."""
    path = Path(settings.out, "run.json")
    now = json.loads(json.dumps(dataclasses.asdict(settings) | {"data": data}))
    if path.exists():
        before = json.loads(path.read_text())
        for name in sorted(before.keys() | now.keys() - FREE):
            if name not in FREE and before.get(name) != now.get(name):
                raise Refused(
                    f"{settings.out} holds a run with {name}={before.get(name)!r}, and this one has {now.get(name)!r}: "
                    "give another --out to begin anew, or the same settings to resume."
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=1) + "\n")


def read_settings(out: str) -> Settings:
    """The settings of the run in folder `out`."""
    path = Path(out, "run.json")
    if not path.exists():
        raise Refused(f"{out} holds no run: give the folder that was --out of `python -m models.train`.")
    values: dict[str, Any] = json.loads(path.read_text())
    del values["data"]
    values.update(text=tuple(values["text"]), out=out)
    return Settings(**values)


# ---- checkpoints and signals


def checkpoints(out: str) -> ocp.CheckpointManager:
    """The last two checkpoints of a run. Written before the run goes on: the next step reuses the memory (donation)."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(Path(out, "checkpoints").absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: tuple) -> None:
    params, optimiser = (ocp.args.StandardSave(part) for part in state)
    manager.save(step, args=ocp.args.Composite(params=params, optimiser=optimiser), force=True)


def restore(manager: ocp.CheckpointManager, step: int, like: tuple) -> tuple:
    params, optimiser = (ocp.args.StandardRestore(part) for part in like)
    found = manager.restore(step, args=ocp.args.Composite(params=params, optimiser=optimiser))
    return found["params"], found["optimiser"]


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Says whether SIGINT or SIGTERM came; a second one has its usual effect."""
    came = []

    def note(number, frame):
        del frame
        came.append(number)
        signal.signal(number, before[number])
        print("stopping after this step; once more stops at once, without saving", flush=True)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- what is told


class Log:
    """metrics.jsonl, and lines on the terminal: a tqdm bar where there is a terminal and tqdm, plain lines otherwise."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.path = Path(settings.out, "metrics.jsonl")
        self.bar: Any = None
        self.then, self.fresh = 0.0, True  # when the last step ended; nothing ran yet

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.bar is not None:
            self.bar.close()

    def begin(self, first: int, about: str) -> None:
        """Drops what was measured after the checkpoint that the run goes on from."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        whole = [line for line in lines if line.endswith("}")]  # a crash may have cut the last one
        kept = [line for line in whole if json.loads(line)["step"] <= first]
        self.path.write_text("".join(line + "\n" for line in kept))
        print(f"{about}; step {first} of {self.settings.steps}", flush=True)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(total=self.settings.steps, initial=first, unit="step", dynamic_ncols=True)
        self.then = time.perf_counter()

    def step(self, step: int, metrics: dict[str, Array]) -> None:
        values = {name: float(x) for name, x in metrics.items()}  # waits for the step
        now = time.perf_counter()
        speed = self.settings.batch * self.settings.context / (now - self.then)
        self.then = now
        note = f"loss {values['loss']:.3f}  {speed:8,.0f} tokens/s  {peak_memory() / 2**20:,.0f} MiB"
        self._write({"step": step} | values | {"tokens_per_second": speed, "peak_bytes": peak_memory()})
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
        elif step % self.settings.log_every == 0 or step == self.settings.steps or self.fresh:
            self._say(f"step {step:5d}/{self.settings.steps}  {note}" + "  (with compilation)" * self.fresh)
        self.fresh = False

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self._write({"step": step} | values)
        self._say(f"step {step:5d}/{self.settings.steps}  evaluation: loss {values['eval_loss']:.3f} nats per token, "
                  f"{values['eval_accuracy']:.1%} right")  # fmt: skip
        self.then = time.perf_counter()

    def _write(self, line: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)


def peak_memory() -> int:
    """Bytes: of the device where it counts them, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kibibytes elsewhere


if __name__ == "__main__":
    main()
