"""Recurrent layers as cuDNN runs them: inputs of all steps in one product, then step after step.

On the meta device torch spells every step out: a dozen kernels where a library has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from foreshard.profile.tracing.attention import Note
from foreshard.profile.tracing.operations import Call, bytes_of

RECURRENCE = "recurrent layer"
CELL = "recurrent cell"
_CELLS = ("lstm_cell", "gru_cell")  # whose gates are one kernel
_KEPT_WIDTH, _KEPT_BLOCK = 1024, 128  # most channels of such a layer, and what they are a multiple of
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """How layers are stacked, and the kernels of one.

    steps_at : dimension of the steps
    each : weights and biases of a layer in one direction
    """

    gates: int
    width: int
    layers: int
    directions: int
    states: int
    steps_at: int
    each: int

    def cells(self, weights: tuple[Any, ...]) -> list[list[tuple[Any, ...]]]:
        """Return the weights of every layer and direction."""
        each = [weights[at : at + self.each] for at in range(0, len(weights), self.each)]
        return [each[at * self.directions : (at + 1) * self.directions] for at in range(self.layers)]

    def forward_calls(self, read: Any, weights: tuple[Any, ...], out: Any) -> list[Call]:
        """Return one product of all inputs, and the steps: of each a product and the gates."""
        rows, steps, wide = self._sizes(read)
        touched = bytes_of((read, weights[0])) + self.gates * bytes_of(out)
        of_inputs = _product((rows, wide, read.shape[-1]), touched, out)
        return [of_inputs, self._steps("recurrent_steps", read, steps, out)]

    def backward_calls(
        self, read: Any, weights: tuple[Any, ...], out: Any, *, first: bool, trained: bool
    ) -> list[Call]:
        """Return the steps, of each the gates and a product, then the gradients of weights and inputs.

        `first` says whether the states that were given get a gradient, `trained` whether weights do: torch
        makes cuDNN write those of all weights or of none, and those of the inputs always.
        """
        rows, steps, wide = self._sizes(read)
        gates = self.gates * bytes_of(out)
        of_weights = [
            _product((wide, self.width, rows), gates + bytes_of((out, weights[1])), out),
            _product((wide, read.shape[-1], rows), gates + bytes_of((read, weights[0])), out),
        ]
        return [
            self._steps("recurrent_steps_backward", read, steps if first else steps - 1, out),
            *(of_weights if trained else []),
            _product((rows, read.shape[-1], wide), gates + bytes_of((read, weights[0])), out),
        ]

    def _sizes(self, read: Any) -> tuple[float, int, float]:
        steps = read.shape[self.steps_at] if read.dim() > 2 else read.shape[0]
        return float(prod(read.shape[:-1])), steps, float(self.gates * self.width)

    def _steps(self, name: str, read: Any, products: int, out: Any) -> Call:
        """Return all steps; their cells read the sums of inputs and states, write gates, cell and output."""
        rows, steps, wide = self._sizes(read)
        states = float(self.width), float(out.element_size()), float(self._is_alone(read.shape[-1]))
        flops = 2.0 * rows / steps * wide * self.width * products
        moved = (3.0 * self.gates + 3.0) * bytes_of(out)
        sizes = (rows / steps, wide, *states, float(steps))
        return Call(name, "recurrence", sizes, moved, flops, wide=out.dtype is torch.float32)

    def _is_alone(self, inputs: int) -> bool:
        """Return whether one kernel may keep the layer's weights (`cost.recurrences.RecurrentKernels`)."""
        single = self.layers == self.directions == 1
        return single and self.width <= _KEPT_WIDTH and self.width % _KEPT_BLOCK == inputs % _KEPT_BLOCK == 0


def _product(sizes: tuple[float, float, float], moved: float, like: Any) -> Call:
    wide = like.dtype is torch.float32
    return Call("recurrent", "product", (*map(float, sizes), 1.0), moved, 2.0 * prod(sizes), wide=wide)


class _Layers(torch.autograd.Function):
    """Recurrent layers without arithmetic: keep their inputs and outputs, gates and cells of every step."""

    @staticmethod
    def forward(ctx: Any, note: Note, shape: _Shape, inputs: Any, *states_and_weights: Any) -> Any:
        states, weights = states_and_weights[: shape.states], states_and_weights[shape.states :]
        kept: list[Any] = []
        made = inputs
        for own in shape.cells(weights):
            read, parts = made, []
            for matrices in own:
                out = read.new_empty((*read.shape[:-1], shape.width))
                gates = read.new_empty((*read.shape[:-1], (shape.gates + 1) * shape.width))
                for call in shape.forward_calls(read, matrices, out):
                    note(RECURRENCE, call, (read, *states, *matrices), (out, gates))
                parts.append(out)
                kept += [read, gates, out]
            made = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        ctx.note, ctx.shape, ctx.num_kept = note, shape, len(kept)
        ctx.save_for_backward(*kept, *states, *weights)
        return (made, *(torch.empty_like(state) for state in states))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shape, saved = ctx.shape, ctx.saved_tensors
        kept, rest = saved[: ctx.num_kept], saved[ctx.num_kept :]
        weights = rest[shape.states :]
        cells = [matrices for layer in shape.cells(weights) for matrices in layer]
        needs = ctx.needs_input_grad[3:]
        asked = {"first": any(needs[: shape.states]), "trained": any(needs[shape.states :])}
        for at, matrices in reversed(list(enumerate(cells))):
            read, gates, out = kept[3 * at : 3 * at + 3]
            for call in shape.backward_calls(read, matrices, out, **asked):
                touched = (gradients[0], read, gates, out, *matrices)
                ctx.note(RECURRENCE, call, touched, (torch.empty_like(read),))
        return (None, None, torch.empty_like(kept[0]), *(torch.empty_like(tensor) for tensor in rest))


class _Gates(torch.autograd.Function):
    """What a cell makes of the products of its input and its state: one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, note: Note, of_input: Any, of_state: Any, state: Any, *biases: Any) -> Any:
        is_lstm = of_input.shape[-1] == 4 * state.shape[-1]
        made = tuple(torch.empty_like(state) for _ in range(1 + is_lstm))
        gates = state.new_empty((*state.shape[:-1], (5 - is_lstm) * state.shape[-1]))
        read = (of_input, of_state, state, *biases)
        note(CELL, Call("cell", "stream", (), bytes_of((read, made, gates)), 0.0), read, (*made, gates))
        ctx.note, ctx.wide, ctx.biases = note, of_input.shape, len(biases)
        ctx.save_for_backward(state, gates, *made[1:])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        state, *kept = ctx.saved_tensors
        is_lstm = len(kept) > 1  # whose gates sum both products: one gradient
        products = tuple(state.new_empty(ctx.wide) for _ in range(2 - is_lstm))
        made = (*products, torch.empty_like(state))
        read = (*gradients, state, *kept)
        ctx.note(CELL, Call("cell_backward", "stream", (), bytes_of((read, made)), 0.0), read, made)
        sums = [product.sum(0) for product in products[: ctx.biases]]
        both = 1 + is_lstm
        return (None, *products * both, made[-1], *(sums * both)[: ctx.biases])


class FusedRecurrence(TorchFunctionMode):
    """Runs recurrent layers and cells by the kernels of a library, as accelerators do.

    A cell is two products and one kernel (torch 2.11, aten/src/ATen/native/cuda/RNN.cu).

    Packed sequences, whose lengths are values, and layers with projections are left to torch. Dropout between
    layers is not counted.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace recurrent layers, pass everything else on."""
        name = getattr(func, "__name__", "")
        if name in _CELLS and not kwargs:
            return self._cell(name, *args)
        # packed sequences have nine arguments, too: their weights where others have whether there are biases
        if name not in _GATES or len(args) != 9 or not isinstance(args[3], bool) or kwargs:
            return func(*args, **(kwargs or {}))
        inputs, states, weights, biases, layers, _, _, both, first = args
        states = tuple(states) if name == "lstm" else (states,)
        directions = 2 if both else 1
        each = 4 if biases else 2
        if len(weights) != layers * directions * each:
            return func(*args)
        shape = _Shape(
            gates=_GATES[name],
            width=states[0].shape[-1],
            layers=layers,
            directions=directions,
            states=len(states),
            steps_at=int(first),
            each=each,
        )
        return _Layers.apply(self._note, shape, inputs, *states, *weights)

    def _cell(self, name: str, read: Any, state: Any, of_input: Any, of_state: Any, *biases: Any) -> Any:
        """Run a cell; an LSTM has a hidden state and one of its own."""
        hidden, kept = state if name == "lstm_cell" else (state, state)
        linear = torch.nn.functional.linear
        products = linear(read, of_input), linear(hidden, of_state)
        given = [bias for bias in biases if bias is not None]
        made = _Gates.apply(self._note, *products, kept, *given)
        return made if name == "lstm_cell" else made[0]
