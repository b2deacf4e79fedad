"""Sequence parallelism: layers whose stream is cut over the sequence between their tensor-parallel products.

Operations on each token by itself (norms, dropout, sums with the stream) run on each rank's part of the
sequence; before a matrix product the parts are gathered, after it the sum is scattered again.

Source
------
Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from foreshard.runtime.tensor.ranks import TensorRanks


class SequenceLayer(nn.Module):
    """A layer that can also run on a part of the sequence."""

    ranks: TensorRanks | None = None
    by_token = True
    """Whether it is such a layer: what it computes of a token depends on no other one."""

    @property
    def parts(self) -> TensorRanks | None:
        """The ranks that hold the other parts of the sequence; None where it is whole."""
        return self.ranks if self.ranks is not None and self.ranks.sequence else None


@contextmanager
def gathering(products: Iterable[nn.Module], ranks: TensorRanks | None) -> Iterator[None]:
    """Give whole sequences to modules that begin with cut products, in a block that runs on a part of one.

    Around the block the model's code sees the whole length, for positions and masks.
    """

    def gathers(module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert ranks is not None
        whole = ranks.gather_for_products(args[0] if args else kwargs["hidden_states"])
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole})

    with ExitStack() as stack:
        for product in products:
            stack.callback(product.register_forward_pre_hook(gathers, with_kwargs=True).remove)
        yield
