"""Train on several devices, each with a part of every row: the mesh, and rows in the order of its devices.

The sequence is sharded over the devices along one mesh axis. Parameters are on all of them.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from models.data import Batch, Refused
from models.transformer import SEQUENCE_AXIS, Config, positions_in_document


class Rows(NamedTuple):
    """The rows of a step, [B, T], with the tokens in the order in which devices hold them."""

    tokens: Any  # int32, that the model reads
    targets: Any  # int32, that it predicts
    weights: Any  # float32: 1 where the prediction counts, else 0
    segment_ids: Any  # int32, the number of the document
    positions: Any  # int32, in the document


def on_devices(config: Config) -> contextlib.AbstractContextManager:
    """Return a context in which programs run on the mesh of `config.devices`, or on one device without a mesh."""
    if config.devices == 1:
        return contextlib.nullcontext()
    devices = jax.devices()
    if len(devices) < config.devices:
        raise Refused(
            f"--devices {config.devices}: this machine has {len(devices)} ({devices[0].device_kind}). Give fewer. "
            f"For a trial on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={config.devices}."
        )
    mesh = jax.make_mesh(
        (config.devices,),
        (SEQUENCE_AXIS,),
        axis_types=(AxisType.Auto,),
        devices=devices[: config.devices],
    )
    return jax.set_mesh(mesh)


def lay_out(config: Config, batch: Batch) -> Rows:
    """Return a batch as rows, reordered and sharded. Call it within `on_devices`."""
    tokens = batch.tokens.astype(np.int32)  # B T+1
    seen, targets = tokens[:, :-1], tokens[:, 1:]
    segment_ids = np.cumsum(seen == 0, axis=1, dtype=np.int32)  # byte 0 starts a document
    positions = positions_in_document(jnp.asarray(segment_ids))
    rows = Rows(seen, targets, batch.weights, segment_ids, positions)
    if config.devices == 1:
        return rows
    order = config.token_order(seen.shape[1])
    reordered = [np.asarray(x)[:, order] for x in rows]
    return jax.device_put(Rows(*reordered), P(None, SEQUENCE_AXIS))


def replicate(config: Config, tree: Any) -> Any:
    """Place a pytree on all devices. Call it within `on_devices`."""
    return tree if config.devices == 1 else jax.device_put(tree, P())
