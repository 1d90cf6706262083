"""Check the keywords of a sequence that is sharded over devices, and pass them on."""

from typing import Any, NamedTuple

import jax

from memeff import sharding
from memeff.arguments import Strategy
from memeff.sequence.batch_and_heads import batch_and_heads_of
from memeff.sequence.choose import check_strategy
from memeff.sequence.layout import Layout, check_layout_name


class SequenceOptions(NamedTuple):
    """The keywords of `dot_product_attention` for many devices, with its defaults."""

    sequence_axis: str | tuple[str, str] | None = None
    sequence_layout: Layout = "contiguous"
    context_parallel: Strategy | None = None
    batch_axis: str | tuple[str, ...] | None = None
    head_axis: str | tuple[str, ...] | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords whose values are not the defaults."""
        defaults = SequenceOptions()._asdict()
        return {name: x for name, x in self._asdict().items() if x != defaults[name]}


def check_sequence_options(options: SequenceOptions) -> None:
    """Refuse values that no call can have."""
    sharding.sequence_axes(options.sequence_axis, None)
    batch_and_heads_of(options)
    check_layout_name(options.sequence_layout)
    check_strategy(options.context_parallel)


def lies_on_mesh(options: SequenceOptions, query: Any) -> bool:
    """Return True if the sequence's axes are those of the context's mesh or of the query's.

    Inside shard_map the query's tokens must lie on different devices.
    """
    axes = sharding.sequence_axes(options.sequence_axis, query)
    if sharding.axes_that_share(query, axes):
        return False
    meshes = [jax.sharding.get_abstract_mesh(), sharding.mesh_of(query)]
    names = {name for mesh in meshes if mesh is not None for name in mesh.axis_names}
    return bool(axes) and names.issuperset(axes)
