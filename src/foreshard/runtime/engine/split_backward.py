"""A backward in two halves: gradients of a chunk's inputs first, those of its weights when there is time.

Torch groups the weights by the graph nodes where their paths meet those of the inputs. Two cases need care:
weights that meet them in several nodes (as weights used twice do) join groups, and weights that do not meet
them at all are in no group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Edges = tuple[list[GradientEdge], list[Tensor]]


@dataclass(frozen=True, slots=True)
class DelayedWeightGradient:
    """What the second half needs.

    Groups are as torch makes them: weights, the nodes to continue from, their gradients. `joint` says that a
    group has several nodes: its gradients then pass through those of others. Weights `apart` are on no path
    to an input; they get their gradients from the `edges` of the outputs.
    """

    groups: list[dict[str, Any]]
    joint: bool
    apart: list[nn.Parameter]
    edges: Edges | None


def input_half(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> DelayedWeightGradient:
    """Add the gradients of the inputs to their `grad`, and return what is left to do; outputs are detached.

    A loss has no gradients of the outputs.
    """
    # loads dynamo, which takes seconds: only where a schedule splits the backward
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward_input

    given = [torch.ones_like(t) for t in outputs] if grads is None else list(grads)
    pairs = [(t, grad) for t, grad in zip(outputs, given, strict=True) if t.requires_grad]
    edges = [get_gradient_edge(t) for t, _ in pairs], [grad for _, grad in pairs]
    detachable = [t.clone() if t._is_view() else t for t, _ in pairs]  # a view cannot be detached in place
    _, found = stage_backward_input(detachable, edges[1], list(inputs), iter(weights))
    groups = _joined(found)
    met = {node for group in groups for node in group["params"]}
    apart = [w for w in weights if _get_grad_fn_or_grad_acc(w) not in met]
    joint = any(len(group["intermediates"]) > 1 for group in groups)
    return DelayedWeightGradient(groups, joint, apart, edges if apart else None)


def weight_half(weights: Sequence[nn.Parameter], delayed: DelayedWeightGradient) -> None:
    """Add the gradients of the weights to their `grad`."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    if delayed.edges is not None and delayed.edges[0]:
        edges, given = delayed.edges
        found = torch.autograd.grad(edges, delayed.apart, given, retain_graph=True, allow_unused=True)
        for weight, grad in zip(delayed.apart, found, strict=True):
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    stage_backward_weight(iter(weights), delayed.groups, retain_graph=delayed.joint)


def _joined(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of which no two share a weight or a node."""
    disjoint: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        weights = set(group["params"])
        nodes = dict(zip(group["intermediates"], group["grads"], strict=True))
        apart = []
        for other_weights, other_nodes in disjoint:
            if other_weights & weights or other_nodes.keys() & nodes.keys():
                weights |= other_weights
                nodes |= other_nodes
            else:
                apart.append((other_weights, other_nodes))
        disjoint = [*apart, (weights, nodes)]
    return [
        {"params": weights, "intermediates": list(nodes), "grads": list(nodes.values())}
        for weights, nodes in disjoint
    ]
