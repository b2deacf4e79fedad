"""A torch module as it was traced: a chain of layers, each with the operations of its forward and backward.

Every number of an operation is a polynomial of the samples of a micro-batch, so that a few traces price any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Growth", "Operation", "Tied", "TracedLayer", "TracedModule", "TracedPart"]

Tied = tuple[tuple[tuple[int, ...], int], ...]
"""(layers that share a parameter, its elements)."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A number of a micro-batch: what it is without samples, and what each sample adds.

    Attributes
    ----------
    square : float
        Of pairs of samples, where a module compares every sample with every other.
    """

    fixed: float
    each: float
    square: float = 0.0

    def at(self, samples: float) -> float:
        """Return the number for a micro-batch.

        Examples
        --------
        >>> Growth(3.0, 2.0).at(4)
        11.0
        """
        return self.fixed + samples * (self.each + samples * self.square)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel.

    Attributes
    ----------
    name : str
        The operator, as torch calls it.
    kind : str
        What prices it: product, experts, convolution, grouped, depthwise, attention, recurrence, batch_norm,
        stream or layout. A convolution is the matrix product that it equals; those in groups that matrix
        units do not take are of their own kinds.
    sizes : tuple of Growth
        product, experts, convolution: rows, columns, inner length, number of products; of a convolution also
        positions of a filter, positions of an image for each of those multiplied (the stride, in the gradient
        of what is read), and rows, columns and inner length of each product of Winograd's algorithm, 0 where
        libraries do not have it; attention: number of sequences, heads, queries, keys, head dimension, 1
        where causal; grouped: channels of a group, 1 where channels are last; depthwise: times that the image
        is read; recurrence: rows, columns and inner length of the product of a step, bytes of an element, 1
        where a layer is alone and of a size that one kernel may keep, steps; batch_norm: channels, elements
        of one, bytes of an element, 1 in the backward, 1 in torch's own kernels; layout: positions of an
        image that a filter of one position may take as it is, else 0, and bytes of an element; others: none.
    bytes : Growth
        Read and written.
    flops : Growth
        2 for each multiply-add of products.
    wide : bool
        Whether products are in 32 bit, whatever the module's precision.
    issued : Growth
        Instructions of threads in a kernel that does not stream at the bandwidth; 0: it does.
    """

    name: str
    kind: str
    sizes: tuple[Growth, ...]
    bytes: Growth
    flops: Growth
    wide: bool = False
    issued: Growth = Growth(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """A part of the chain: one tensor goes in, one comes out."""

    name: str  # the last module in it
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    # elements: of parameters that get a gradient, of those that do not, of buffers
    parameters: int
    frozen: int
    buffers: int
    saved_bytes: Growth  # kept from forward to backward
    boundary_bytes: Growth  # handed to the next layer
    # most that the backward holds beyond what was kept, of gradients and of what it makes on the way
    beside_bytes: Growth = Growth(0.0, 0.0)
    # the largest modules that ran and whose parameters are all of this layer, by name
    modules: tuple[str, ...] = ()
    # sums_forward and sums_backward: bytes of each sum over the ranks that compute the layer together
    sums_forward: tuple[Growth, ...] = ()
    sums_backward: tuple[Growth, ...] = ()
    # elements of parameters that each of these ranks holds whole, but of whose gradients a summand
    unsummed: int = 0
    splits_boundary: bool = False  # whether each of them hands on a part


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """What each rank does and holds where several compute every layer together."""

    layers: tuple[TracedLayer, ...]
    tied: Tied  # as `TracedModule.tied`, of a rank
    split: tuple[str, ...]  # parameters that the ranks share out
    whole: Mapping[str, str]  # weights of products that each rank holds whole, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module, traced in one precision."""

    name: str
    layers: tuple[TracedLayer, ...]
    precision: str
    source: str
    tied: Tied = ()  # each of the layers counts the elements
    casts_weights: bool = True  # whether each step casts all weights to 16 bit besides its operations
    # of an element of parameters without a gradient, and of buffers, from one step to the next
    weight_bytes: int = 4
    cudnn: int = 9  # release of NVIDIA's library of convolutions that runs it
    reads_images: bool = False  # whether an input is an image or a volume: numbers in four dimensions or more
    assumptions: tuple[str, ...] = ()
    # by the number of ranks that compute every layer together
    parts: Mapping[int, TracedPart] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """All parameters, shared ones once."""
        again = sum((len(layers) - 1) * elements for layers, elements in self.tied)
        return sum(layer.parameters + layer.frozen for layer in self.layers) - again

    def flops(self, samples: float) -> float:
        """Return the FLOPs of forward and backward of a micro-batch."""
        return sum(
            operation.flops.at(samples)
            for layer in self.layers
            for operation in (*layer.forward, *layer.backward)
        )

    def saved_bytes(self, samples: float) -> float:
        """Return the bytes that forward keeps for backward."""
        return sum(layer.saved_bytes.at(samples) for layer in self.layers)
