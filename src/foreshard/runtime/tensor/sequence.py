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

from torch import Tensor, nn

from foreshard.runtime.tensor.ranks import TensorRanks


class SequenceLayer(nn.Module):
    """A layer that can also run on a part of the sequence."""

    ranks: TensorRanks | None = None

    @property
    def parts(self) -> TensorRanks | None:
        """The ranks that hold the other parts of the sequence; None where it is whole."""
        return self.ranks if self.ranks is not None and self.ranks.sequence else None


@contextmanager
def on_part(
    block: nn.Module, products: Iterable[nn.Module], own: Tensor, ranks: TensorRanks
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Run a block on its own part of the sequence while the code around it sees the whole length.

    Positions and masks are of the whole sequence. The code around gets a tensor of that length without data,
    which enters and leaves the block in the place of the part. It is yielded, with the outputs of the block
    for the part. `products` are the modules of the block that begin with cut products: they get the whole
    sequence.
    """
    samples, length, channels = own.shape
    placeholder = own.detach().new_zeros(()).expand(samples, length * ranks.degree, channels)
    made: list[Tensor] = []

    def enters(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _replaced(args, kwargs, own)

    def leaves(module: nn.Module, args: Any, output: Any) -> Any:
        made.append(output[0] if isinstance(output, tuple) else output)
        return (placeholder, *output[1:]) if isinstance(output, tuple) else placeholder

    def gathers(module: nn.Module, args: Any, kwargs: Any) -> Any:
        part = args[0] if args else kwargs["hidden_states"]
        return _replaced(args, kwargs, ranks.gather_for_products(part))

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(enters, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(leaves).remove)
        for product in products:
            stack.callback(product.register_forward_pre_hook(gathers, with_kwargs=True).remove)
        yield placeholder, made


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments with another stream."""
    return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})
