"""Methods of compression by name, for the runtime and for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreshard.comm.compression.methods import CompressionMethod, compression_method
from foreshard.transport.compression.compressor import Compressor, Shapes, SumRanks, WarmUp
from foreshard.transport.compression.low_rank import LowRank
from foreshard.transport.compression.quantized import EightBit, Signs
from foreshard.transport.compression.sparse import TopK

MakeCompressor = Callable[[Shapes, WarmUp], Compressor]
Hook = Callable[[dict[Any, Compressor], Any], "torch.futures.Future[Tensor]"]


def compressor_of(method: CompressionMethod) -> MakeCompressor:
    """Return what makes the compressor of a bucket from the shapes in it and the warm-up.

    Examples
    --------
    >>> compressor_of(compression_method("int8"))(((4, 4),), WarmUp()).shapes
    ((4, 4),)
    """
    if method.name == "powersgd":
        return partial(LowRank, rank=int(method.value))
    if method.name == "topk":
        return partial(TopK, fraction=method.value)
    if method.name == "onebit":
        return Signs
    return partial(EightBit, kind=torch.int8 if method.name == "int8" else torch.float8_e4m3fn)


def ddp_hook(method: str, group: Any, warm_up: WarmUp | None = None) -> tuple[dict[Any, Compressor], Hook]:
    """Return state and hook of ``DistributedDataParallel.register_comm_hook`` for a method.

    The gradients that DDP then takes are the mean of all ranks', as without a hook.

    Parameters
    ----------
    method : str
        As ``--compress`` takes it.
    group : process group
        Of the model, in host memory.
    warm_up : WarmUp, optional
        Whose step the caller counts up. Under Adam its end is where `FrozenAdam` takes over.

    Examples
    --------
    ``model.register_comm_hook(*ddp_hook("powersgd:4", dist.group.WORLD))``
    """
    make, warming = compressor_of(compression_method(method, key="method")), warm_up or WarmUp()

    def hook(state: dict[Any, Compressor], bucket: Any) -> torch.futures.Future[Tensor]:
        shapes = tuple(tuple(parameter.shape) for parameter in bucket.parameters())
        key = bucket.index(), shapes  # DDP cuts buckets anew after the first step
        if key not in state:
            state[key] = make(shapes, warming)
        flat = bucket.buffer()
        state[key].sum(flat, SumRanks(group, group.rank(), group.size()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat.div_(group.size()))
        return done

    hook.__annotations__.clear()  # DDP compares them with types, and these are texts
    return {}, hook
