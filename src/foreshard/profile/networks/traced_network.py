"""A network of the catalog, or of timm, as a traced module."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from foreshard.errors import ExtraMissingError, SpecError
from foreshard.profile.networks.catalog import is_mixed, network
from foreshard.spec.traced_module import TracedModule

_MOST_PIXELS = 65_536  # of a side
_KEPT = 64  # traces, of megabytes each


@lru_cache(maxsize=_KEPT)
def trace_network(
    name: str,
    *,
    side: int | None = None,
    precision: str = "bf16",
    channels_last: bool = False,
    degrees: tuple[int, ...] = (),
    training: bool = True,
    where: str = "module",
    **changed: Any,
) -> TracedModule:
    """Return a network as a chain of layers with their operations.

    The last few are kept: a trace takes seconds and knows of no batch and no cluster.

    Parameters
    ----------
    name : str
        As `catalog.network_name` returns it.
    side : int, optional
        Of a classifier's image, pixels.
    precision : {'fp32', 'tf32', 'fp16', 'bf16'}
    channels_last : bool
        Whether images and filters have their channels last.
    degrees : tuple of int
        Numbers of ranks, above 1, that may compute each layer together.
    training : bool
        Whether it is trained, or runs forward alone.
    where : str
        Where it comes from, for messages.
    **changed
        Arguments of the network in place of its own.

    Raises
    ------
    ExtraMissingError
        Without torch, or the library that makes the network.
    SpecError
        For a name or a side that the library does not make, and what cannot be traced.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        what = f"networks are traced, which needs {error.name}"
        raise ExtraMissingError(what, fix="The extra foreshard[run] brings torch") from error
    from foreshard.profile.tracing.trace import trace_module

    if side is not None and not 0 < side <= _MOST_PIXELS:
        rule = f"An image has 1 to {_MOST_PIXELS:,} pixels a side"
        raise SpecError(f"an image of {side} pixels a side", key="side", value=side, rule=rule)
    module, inputs = network(name, side=side, **changed)
    if channels_last:
        volumes = any(parameter.ndim == 5 for parameter in module.parameters())
        module = module.to(memory_format=torch.channels_last_3d if volumes else torch.channels_last)
    return trace_module(
        module,
        inputs,
        precision=precision,
        autocast=is_mixed(name),
        degrees=degrees,
        training=training,
        name=name,
        where=where,
    )
