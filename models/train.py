r"""Train the byte-level language model of `models.transformer`. The same command resumes an interrupted run.

    python -m models.train                          # Python's own library, 4,096 bytes of context, CPU or GPU
    python -m models.train --text book.txt folder/  # any text
    python -m models.train --attention jax.nn --out runs/other   # the same data, with the attention of jax.nn
    python -m models.train --task listops --context 2048         # a long-range task: nested MIN, MAX, MED, SM
    python -m models.train --devices 8 --context 1048576         # eight devices share each row; the loss is the same

On two CPU cores the first command trains at 4,900 tokens/s. The evaluation loss is near 2.40 nats per byte after 50 steps
(50 s), and 2.24 after 200.

A run writes into --out: metrics.jsonl (one line per step), checkpoints/ and run.json (the settings). A crash or a full disk
at any moment costs the steps since the last checkpoint and nothing else. If that checkpoint cannot be read, the run resumes
from the one before it.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import shutil
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
from flax import nnx
from jax import Array, lax

from memeff.device import set_copied_messages
from models.data import ListOps, Refused, Task, Text
from models.devices import Rows, lay_out, on_devices, replicate
from models.files import append_line, one_sentence, replace_file, sync, warn, write_file, writing
from models.transformer import Config, Transformer


@dataclasses.dataclass(frozen=True)
class Settings(Config):
    """The settings of a run. `python -m models.train --help` lists them."""

    out: Annotated[str, "folder of the run"] = "runs/train"
    task: Annotated[Literal["text", "listops"], "what the model learns"] = "text"
    text: Annotated[tuple[str, ...], "text files or folders (default: Python's own library)"] = ()
    context: Annotated[int, "tokens in a row"] = 4096
    batch: Annotated[int, "rows in a step"] = 1
    accumulate: Annotated[int, "parts of a step's rows that are computed one after the other"] = 1
    steps: Annotated[int, "steps of the whole run"] = 200
    learning_rate: Annotated[
        float | None,
        "the highest of the schedule (default: 0.003, or 0.384 / width if that is less)",
    ] = None
    warmup: Annotated[
        int, "steps in which the rate rises from 0; then a cosine down to a tenth"
    ] = 20
    weight_decay: Annotated[float, "weight decay of AdamW, on matrices"] = 0.1
    clip: Annotated[float, "largest global norm of the gradient"] = 1.0
    eval_every: Annotated[int, "steps between evaluations"] = 50
    eval_batches: Annotated[int, "batches in an evaluation"] = 4
    save_every: Annotated[int, "steps between checkpoints"] = 50
    log_every: Annotated[int, "steps between printed lines"] = 10
    minutes: Annotated[float | None, "save and stop after this time, as if interrupted"] = None
    seed: Annotated[int, "seed of parameters and data"] = 0

    def __post_init__(self):
        super().__post_init__()
        self.check_counts("context", "batch", "accumulate", "steps")
        self.check_counts("eval_every", "eval_batches", "save_every", "log_every")
        if self.batch % self.accumulate:
            raise Refused(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}.")
        if not 0 <= self.warmup < self.steps:
            raise Refused(f"warmup={self.warmup} must be >= 0 and less than steps={self.steps}.")
        rates = {"learning_rate": self.highest_rate, "weight_decay": self.weight_decay}
        for name, rate in rates.items():
            if not 0 <= rate < math.inf:
                raise Refused(f"{name}={rate}: it must be >= 0 and finite.")
        if not self.clip > 0:
            raise Refused(f"clip={self.clip}: it must be above 0; inf clips nothing.")
        if self.minutes is not None and not self.minutes >= 0:
            raise Refused(f"minutes={self.minutes}: it must be >= 0; leave it out for no limit.")
        if not 0 <= self.seed < 2**63:
            raise Refused(f"seed={self.seed}: it must be >= 0 and fit in 64 bits.")
        if self.task == "listops" and self.text:
            raise Refused(
                "task=listops makes its own rows and reads no text: leave --text out, or use --task text."
            )
        layout = self.sequence_keywords().get("sequence_layout")
        parts = 2 * self.devices if layout == "zigzag" else self.devices
        if self.context % parts:
            raise Refused(
                f"context={self.context} must be a multiple of {parts}, so that devices={self.devices} share a row "
                f"(layout={layout})."
            )
        chunk = min(self.feed_forward_chunk or self.context, self.context)
        if self.devices > 1 and (self.context % chunk or chunk % self.devices):
            raise Refused(
                f"feed_forward_chunk={chunk} must divide context={self.context} and be a multiple of devices={self.devices}, "
                "so that no tokens move between devices; leave it out for all tokens."
            )

    @property
    def highest_rate(self) -> float:
        """Return the highest learning rate: AdamW moves each weight by about it, and a wide layer adds up many weights."""
        if self.learning_rate is not None:
            return self.learning_rate
        return min(0.003, 0.384 / self.width)


# What may differ between a run and its resumption: none of it changes what is computed.
FREE = {
    "out",
    "remat",
    "scan_layers",
    "feed_forward_chunk",
    "attention",
    "devices",
    "layout",
    "eval_every",
    "save_every",
    "log_every",
    "minutes",
}


def main(arguments: list[str] | None = None) -> None:
    with one_sentence("models.train"):
        settings = parse(arguments)
        if settings.devices > 1:
            set_copied_messages()
        finished = train(settings)
    if not finished:
        raise SystemExit(
            "models.train: stopped early and saved; the same command resumes where it was."
        )


def train(settings: Settings) -> bool:
    """Run or resume; return False if a signal or `minutes` stopped it before its last step."""
    with on_devices(settings):
        return train_on_devices(settings)


def train_on_devices(settings: Settings) -> bool:
    """Run or resume on the devices of the context."""
    task = open_task(settings)
    record = check_same_run(settings, str(task))
    model = Transformer(settings, rngs=nnx.Rngs(settings.seed))
    graphdef, params = nnx.split(model, nnx.Param)
    state = params, make_optimiser(settings).init(params)
    with stop_signals() as stopped, Log(settings) as log:
        first, state = restore(settings.out, state)
        set_aside(settings.out, first)
        state = replicate(settings, state)
        size = sum(x.size for x in jax.tree.leaves(params))
        log.begin(
            first,
            f"{task}; {size:,} parameters; {settings.attention} on {describe_devices(settings)}",
        )
        started = time.perf_counter()
        for step in range(first, settings.steps):
            rows = lay_out(settings, task.train_batch(settings.seed, step))
            state, metrics = train_step(settings, graphdef, state, rows)
            log.step(step + 1, metrics)
            late = (
                settings.minutes is not None
                and time.perf_counter() - started > 60 * settings.minutes
            )
            stop = late or stopped()
            last = step + 1 == settings.steps
            if last or (step + 1) % settings.eval_every == 0:
                log.evaluation(step + 1, evaluate(settings, graphdef, state[0], task))
            if last or stop or (step + 1) % settings.save_every == 0:
                sync(log.path)  # a checkpoint's history is on the disk before the checkpoint
                save(settings.out, step + 1, state, record)
            if stop and not last:
                return False
    return True


# ---- a step


def make_optimiser(settings: Settings) -> optax.GradientTransformation:
    peak = settings.highest_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, settings.warmup, settings.steps, 0.1 * peak
    )

    def matrices(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "scale" not in jax.tree_util.keystr(path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=matrices),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    settings: Settings, graphdef: Any, state: tuple, rows: Rows
) -> tuple[tuple, dict[str, Array]]:
    """Return the state (parameters and the optimiser's) after one more step, and the measurements."""
    params, optimiser_state = state
    (loss, accuracy), gradient = loss_and_gradient(graphdef, params, rows, settings.accumulate)
    updates, optimiser_state = make_optimiser(settings).update(gradient, optimiser_state, params)
    metrics = {"loss": loss, "accuracy": accuracy, "gradient_norm": optax.tree.norm(gradient)}
    return (optax.apply_updates(params, updates), optimiser_state), metrics


def loss_and_gradient(
    graphdef: Any, params: Any, rows: Rows, accumulate: int
) -> tuple[tuple[Array, Array], Any]:
    """Return (loss, accuracy) of rows and the gradient of their loss, in `accumulate` pieces; the same for any number."""
    total = jnp.sum(rows.weights)
    gradient = jax.value_and_grad(
        lambda params, piece: loss_sum(graphdef, params, piece, total), has_aux=True
    )

    def add(so_far, piece):
        return jax.tree.map(jnp.add, so_far, gradient(params, piece)), None

    pieces = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), rows)
    zero = jax.tree.map(jnp.zeros_like, ((total, total), params))
    sums, _ = lax.scan(add, zero, pieces)
    return sums


@functools.partial(jax.jit, static_argnums=0)
def loss_sum(graphdef: Any, params: Any, rows: Rows, total: Array | float) -> tuple[Array, Array]:
    """Return what the rows add to the mean loss (nats per predicted token) and the accuracy, for a weight of `total`."""
    model: Transformer = nnx.merge(graphdef, params)
    x = model.hidden(rows.tokens, rows.segment_ids, rows.positions)
    losses = model.losses(x, rows.targets)
    right = model.predictions(x) == rows.targets
    return jnp.sum(losses * rows.weights) / total, jnp.sum(right * rows.weights) / total


def evaluate(settings: Settings, graphdef: Any, params: Any, task: Task) -> dict[str, float]:
    """Return mean loss and accuracy over the same `eval_batches` batches each time."""
    batches = [task.eval_batch(i) for i in range(settings.eval_batches)]
    sums = [loss_sum(graphdef, params, lay_out(settings, batch), 1.0) for batch in batches]
    loss, accuracy = np.sum(sums, axis=0) / sum(batch.weights.sum() for batch in batches)
    return {"eval_loss": float(loss), "eval_accuracy": float(accuracy)}


# ---- settings


def parse(arguments: list[str] | None) -> Settings:
    """Read the settings from the command line: a flag for each field, its type and its default."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(Settings, include_extras=True)
    for field in dataclasses.fields(Settings):
        kind, text = get_args(hints[field.name])
        if get_origin(kind) in (Union, types.UnionType):  # int | None
            kind = get_args(kind)[0]
        keywords: dict[str, Any] = {"type": kind}
        if get_origin(kind) is Literal:
            keywords = {"choices": get_args(kind)}
        elif get_origin(kind) is tuple:
            keywords = {"nargs": "+", "metavar": "PATH"}
        elif kind is bool:
            keywords = {"action": argparse.BooleanOptionalAction}
        shown = text if field.default in (None, ()) else f"{text} (default: {field.default})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"), default=field.default, help=shown, **keywords
        )
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    values["text"] = tuple(values["text"])
    return Settings(**values)


def open_task(settings: Settings) -> Task:
    if settings.task == "listops":
        return ListOps(settings.context, settings.batch)
    return Text(settings.text, settings.context, settings.batch)


def check_same_run(settings: Settings, data: str) -> dict[str, Any]:
    """Write run.json and return what it holds. Refuse to resume a run that had other settings or data."""
    now = json.loads(json.dumps(dataclasses.asdict(settings) | {"data": data}))
    before = read_record(settings.out)
    if before is not None:
        for name in sorted(before.keys() | now.keys() - FREE):
            if name not in FREE and before.get(name) != now.get(name):
                raise Refused(
                    f"{settings.out} holds a run with {name}={before.get(name)!r}, and this one has {now.get(name)!r}: "
                    "give another --out to begin anew, or the same settings to resume."
                )
    contents = json.dumps(now, indent=1) + "\n"
    replace_file(Path(settings.out, "run.json"), contents.encode())
    return now


def read_settings(out: str) -> Settings:
    """Return the settings of the run in folder `out`."""
    record = read_record(out)
    if record is None:
        raise Refused(
            f"{out} holds no run: give the folder that was --out of `python -m models.train`."
        )
    try:
        record.pop("data")
        return Settings(**record | {"text": tuple(record["text"]), "out": out})
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"{out}/run.json does not hold the settings of this version of models.train ({error}): "
            "train with this version, or use the version that trained the run."
        ) from error


def read_record(out: str) -> dict[str, Any] | None:
    """Return what run.json holds, the settings and a description of the data; None where there is no run.

    Where run.json is damaged or missing, the newest readable checkpoint has the same record.
    """
    path = Path(out, "run.json")
    trouble = "damaged"
    try:
        contents = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        contents = b""
        trouble = "missing"
    except OSError as error:
        raise Refused(f"cannot read {path} ({error.strerror}): make it readable.") from error
    except ValueError as error:  # a byte 0, or half of a surrogate pair
        raise Refused(f"no folder can have the name {ascii(out)}: give another.") from error
    with contextlib.suppress(ValueError):
        record = json.loads(contents)
        if isinstance(record, dict):
            return record
    for step in saved_steps(out):
        with contextlib.suppress(Exception), open_checkpoint(out, step) as arrays:
            record = json.loads(arrays["run"].item())
            warn(f"{path} is {trouble}: the settings are taken from checkpoint {step}.")
            return record
    if trouble == "damaged":
        raise Refused(
            f"{path} is damaged and no checkpoint holds the settings: remove {path} to begin anew."
        )
    return None


# ---- checkpoints and signals


def save(out: str, step: int, state: tuple, record: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all, and keep the last two. The zip format adds a checksum to each array.

    The settings in `record` go with it, so that the run survives a damaged run.json.
    """
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in named_leaves(state)}
    contents = io.BytesIO()
    # as bytes, because NumPy's text takes four bytes a character
    np.savez(contents, **arrays, run=json.dumps(record).encode())
    folder = checkpoint_folder(out, step)
    unfinished = folder.with_name("unfinished")
    with writing(folder):
        try:
            # CPython 3.12 may crash on getbuffer() (gh-111049)
            write_file(unfinished / "state.npz", contents.getvalue())
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in saved_steps(out)[2:]:
            shutil.rmtree(checkpoint_folder(out, old))


def restore(out: str, like: tuple) -> tuple[int, tuple]:
    """Return the step and the state of the newest readable checkpoint; 0 and `like` where there is no checkpoint.

    `like` may be the first elements of the state alone.
    """
    steps = saved_steps(out)
    for step in steps:
        try:
            return step, read_checkpoint(out, step, like)
        except Exception as error:  # a damaged file fails in many ways
            reason = " ".join(str(error).split()) or type(error).__name__
            warn(
                f"checkpoint {checkpoint_folder(out, step)} cannot be read ({reason}): trying the one before it."
            )
    if steps:
        raise Refused(f"no checkpoint in {out} can be read: give another --out to begin anew.")
    return 0, like


def read_checkpoint(out: str, step: int, like: tuple) -> tuple:
    """Return the state in a checkpoint; raise an exception, of whatever kind, if it is damaged or not like `like`."""
    with open_checkpoint(out, step) as arrays:
        leaves = []
        for name, expected in named_leaves(like):
            leaf = arrays[name]
            if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name} is {leaf.dtype}{leaf.shape}, not {expected.dtype}{expected.shape}"
                )
            leaves.append(jnp.array(leaf))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@contextlib.contextmanager
def open_checkpoint(out: str, step: int) -> Iterator[Any]:
    """Open the arrays of a checkpoint by name; each is read, and compared with its checksum, when it is asked for."""
    path = checkpoint_folder(out, step) / "state.npz"
    with path.open("rb") as file, np.load(file) as arrays:
        yield arrays


def set_aside(out: str, first: int) -> None:
    """Rename unreadable checkpoints after step `first`, to make way for those that the run writes next."""
    for step in saved_steps(out):
        folder = checkpoint_folder(out, step)
        if step > first:
            with writing(folder):
                aside = folder.with_name(f"{step}.unreadable")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(folder, aside)


def saved_steps(out: str) -> list[int]:
    """Return the steps that have a checkpoint, the newest first."""
    folder = Path(out, "checkpoints")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def checkpoint_folder(out: str, step: int) -> Path:
    return Path(out, "checkpoints", str(step))


def named_leaves(tree: Any) -> list[tuple[str, Array]]:
    """Return each array of a state with the name that it has in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Give a function that returns whether SIGINT or SIGTERM came; a second one has its usual effect."""
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
    """Write metrics.jsonl, and a tqdm bar if there is a terminal and tqdm, or else plain lines."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.path = Path(settings.out, "metrics.jsonl")
        self.bar: Any = None
        self.step_end = 0.0  # when the last step ended
        self.is_first_step = True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.bar is not None:
            self.bar.close()

    def begin(self, first: int, about: str) -> None:
        """Drop the lines of steps after `first`, the checkpoint that the run goes on from: they are measured again."""
        if self.path.exists():
            self._keep(first)
        print(f"{about}; step {first} of {self.settings.steps}", flush=True)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self.bar = tqdm(
                    total=self.settings.steps, initial=first, unit="step", dynamic_ncols=True
                )
        self.step_end = time.perf_counter()

    def _keep(self, last: int) -> None:
        """Drop the lines of steps after `last` and those that cannot be read, such as one that a crash cut."""
        kept, damaged = [], 0
        for line in self.path.read_bytes().splitlines():
            try:
                if json.loads(line)["step"] <= last:
                    kept.append(line + b"\n")
            except (ValueError, TypeError, KeyError):
                damaged += 1
        replace_file(self.path, b"".join(kept))
        if damaged:
            warn(
                f"{self.path}: {damaged} damaged line(s) dropped, such as a crash leaves at the end."
            )

    def step(self, step: int, metrics: dict[str, Array]) -> None:
        values = {name: float(x) for name, x in metrics.items()}  # waits for the step
        now = time.perf_counter()
        speed = self.settings.batch * self.settings.context / (now - self.step_end)
        self.step_end = now
        note = (
            f"loss {values['loss']:.3f}  {speed:8,.0f} tokens/s  {peak_memory() / 2**20:,.0f} MiB"
        )
        line = {"step": step} | values | {"tokens_per_second": speed, "peak_bytes": peak_memory()}
        append_line(self.path, json.dumps(line))
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
        elif (
            step % self.settings.log_every == 0 or step == self.settings.steps or self.is_first_step
        ):
            self._say(
                f"step {step:5d}/{self.settings.steps}  {note}"
                + "  (with compilation)" * self.is_first_step
            )
        self.is_first_step = False

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        append_line(self.path, json.dumps({"step": step} | values))
        self._say(f"step {step:5d}/{self.settings.steps}  evaluation: loss {values['eval_loss']:.3f} nats per token, "
                  f"{values['eval_accuracy']:.1%} right")  # fmt: skip
        self.step_end = time.perf_counter()

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)


def describe_devices(settings: Settings) -> str:
    """Return the kind of the devices, and how many share a row if it is more than one."""
    kind = jax.devices()[0].device_kind
    if settings.devices == 1:
        return kind
    layout = settings.sequence_keywords()["sequence_layout"]
    return f"{settings.devices} x {kind} ({layout})"


def peak_memory() -> int:
    """Return the peak bytes of the device where it counts them, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kibibytes elsewhere


if __name__ == "__main__":
    main()
