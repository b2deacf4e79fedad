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
    """A part of the chain: one tensor goes in, one comes out.

    Attributes
    ----------
    name : str
        The last module in it.
    forward, backward : tuple of Operation
    parameters, frozen, buffers : int
        Elements: of parameters that get a gradient, of those that do not, of buffers.
    saved_bytes : Growth
        Kept from forward to backward.
    boundary_bytes : Growth
        Handed to the next layer.
    beside_bytes : Growth
        Most that the backward holds beyond what was kept, of gradients and of what it makes on the way.
    modules : tuple of str
        The largest modules that ran and whose parameters are all of this layer, by name.
    sums_forward, sums_backward : tuple of Growth
        Bytes of each sum over the ranks that compute the layer together.
    unsummed : int
        Elements of parameters that each of these ranks holds whole, but of whose gradients a summand.
    splits_boundary : bool
        Whether each of them hands on a part.
    """

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    parameters: int
    frozen: int
    buffers: int
    saved_bytes: Growth
    boundary_bytes: Growth
    beside_bytes: Growth = Growth(0.0, 0.0)
    modules: tuple[str, ...] = ()
    sums_forward: tuple[Growth, ...] = ()
    sums_backward: tuple[Growth, ...] = ()
    unsummed: int = 0
    splits_boundary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """What each rank does and holds where several compute every layer together.

    Attributes
    ----------
    layers : tuple of TracedLayer
    tied : Tied
        As `TracedModule.tied`, of a rank.
    split : tuple of str
        Parameters that the ranks share out.
    whole : mapping of str to str
        Weights of products that each rank holds whole, and why.
    """

    layers: tuple[TracedLayer, ...]
    tied: Tied
    split: tuple[str, ...]
    whole: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module, traced in one precision.

    Attributes
    ----------
    tied : Tied
        Each of the layers counts the elements.
    parts : mapping of int to TracedPart
        By the number of ranks that compute every layer together.
    casts_weights : bool
        Whether each step casts all weights to 16 bit besides its operations.
    weight_bytes : int
        Of an element of parameters without a gradient, and of buffers, from one step to the next.
    cudnn : int
        Release of NVIDIA's library of convolutions that runs it.
    reads_images : bool
        Whether an input is an image or a volume: numbers in four dimensions or more.
    """

    name: str
    layers: tuple[TracedLayer, ...]
    precision: str
    source: str
    tied: Tied = ()
    casts_weights: bool = True
    weight_bytes: int = 4
    cudnn: int = 9
    reads_images: bool = False
    assumptions: tuple[str, ...] = ()
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
