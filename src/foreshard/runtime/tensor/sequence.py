"""Layers whose stream may lie cut over the sequence between their cut products (sequence parallelism).

What is done to every word by itself (norms, dropout, sums with the stream) each rank does for its part of the
sequence; before a product the parts are put together, behind it what is summed is cut again.

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
    """A layer that also takes a part of the sequence, where its ranks say so."""

    ranks: TensorRanks | None = None

    @property
    def parts(self) -> TensorRanks | None:
        """Those that have the other parts of the sequence; None where it is whole."""
        return self.ranks if self.ranks is not None and self.ranks.sequence else None


@contextmanager
def on_part(
    block: nn.Module, products: Iterable[nn.Module], own: Tensor, ranks: TensorRanks
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Let a block have a part of the sequence while the code around it sees the whole length.

    Positions and masks are of the whole sequence. The code around is given a tensor of that length that holds
    nothing, which enters and leaves the block in the place of the part.

    Parameters
    ----------
    block : nn.Module
    products : iterable of nn.Module
        Parts of the block that begin with cut products: they get the whole sequence.
    own : Tensor, shape (samples, part of the sequence, channels)
    ranks : TensorRanks

    Yields
    ------
    (Tensor, list of Tensor)
        What holds nothing, and what the block has made of the part.
    """
    samples, length, channels = own.shape
    nothing = own.detach().new_zeros(()).expand(samples, length * ranks.degree, channels)
    made: list[Tensor] = []

    def enters(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _replaced(args, kwargs, own)

    def leaves(module: nn.Module, args: Any, output: Any) -> Any:
        made.append(output[0] if isinstance(output, tuple) else output)
        return (nothing, *output[1:]) if isinstance(output, tuple) else nothing

    def gathers(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _replaced(args, kwargs, ranks.whole(args[0] if args else kwargs["hidden_states"]))

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(enters, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(leaves).remove)
        for part in products:
            stack.callback(part.register_forward_pre_hook(gathers, with_kwargs=True).remove)
        yield nothing, made


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments with another stream."""
    return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})
