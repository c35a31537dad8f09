"""`Layer`, the base of all layers, and the functions that walk over layers."""

from __future__ import annotations

import sys
from typing import Any, Iterator, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

from synkhronos.rules.compatible.models.layers2.weights import SEED, Weight, rng

WEIGHTS = ("W", "W0", "W1", "b", "b0", "b1", "gamma", "beta")
_seeds = np.random.RandomState(SEED)  # of the random streams, in the order of layers


def set_seed(seed: int) -> None:
    """Seed the weights and the random streams of layers that are made from now on."""
    rng.seed(seed)
    _seeds.seed(seed)


def new_stream() -> MRG_RandomStreams:
    """Return random streams for one layer, the same in each process that makes the same layers."""
    return MRG_RandomStreams(int(_seeds.randint(1, 2**30)))


def relu(x: Any) -> Any:
    """Return max(x, 0)."""
    return T.nnet.relu(x)


class Layer:
    """A layer: an expression of its input, and its weights.

    Parameters
    ----------
    input : Layer or symbolic variable
        The layer before, or what the first layer takes.
    input_shape : tuple of int, optional
        Needed where `input` is no layer.
    printinfo : bool, optional
        Whether to print the shapes.

    Attributes
    ----------
    input_layer : Layer or None
    output : symbolic variable
    output_shape : tuple of int
    params, weight_type : lists
        The shared variables, and 'W' or 'b' for each.
    """

    def __init__(self, input: Any, input_shape: Any = None, printinfo: bool = False):
        is_layer = isinstance(input, Layer)
        self.input_layer = input if is_layer else None
        self.input = input.output if is_layer else input
        if input_shape is None:
            if not is_layer:
                raise TypeError(
                    f"{type(self).__name__} needs input_shape, as its input is no layer of layers2."
                )
            input_shape = input.output_shape
        elif is_layer and tuple(input_shape) != tuple(input.output_shape):
            raise ValueError(
                f"input_shape of {type(self).__name__} must be {input.output_shape}, the shape of "
                f"the layer before, got {tuple(input_shape)}."
            )
        self.input_shape = tuple(int(n) for n in input_shape)
        self.printinfo = printinfo
        self.params: list[Any] = []
        self.weight_type: list[str] = []

    def _finish(self, output, output_shape):
        """Keep the output, collect the weights, and print the shapes."""
        self.output, self.output_shape = output, tuple(int(n) for n in output_shape)
        weights = [getattr(self, name, None) for name in WEIGHTS]
        self.params = [each.val for each in weights if isinstance(each, Weight)]
        self.weight_type = extract_weight_types(self.params)
        if self.printinfo:
            tell(f"{type(self).__name__}: {self.input_shape} -> {self.output_shape}")


class Switch:
    """A number in graphs that is 1 or 0 for all layers of a class at once."""

    def __init__(self, name: str):
        self.value = theano.shared(np.float32(1), name)

    def set_on(self) -> None:
        """Set all layers of the class to training."""
        self.value.set_value(np.float32(1))

    def set_off(self) -> None:
        """Set all layers of the class to validation."""
        self.value.set_value(np.float32(0))

    def choose(self, on: Any, off: Any) -> Any:
        """Return an expression that is `on` or `off`."""
        return T.switch(self.value, on, off)


def tell(text: str) -> None:
    """Write a line on standard output."""
    sys.stdout.write(f"{text}\n")


def get_layers(lastlayer: Layer) -> list[Layer]:
    """Return all layers that a layer depends on, first ones first, and itself as the last.

    Layers inside a composite layer, its attributes, come before it. A layer may have a list of
    layers as its ``input_layer``.
    """
    found: dict[int, Layer] = {}

    def visit(layer):
        if layer is None or id(layer) in found:
            return
        before = layer.input_layer
        for each in before if isinstance(before, (list, tuple)) else [before]:
            visit(each)
        for each in _inner(layer):
            visit(each)
        found[id(layer)] = layer

    visit(lastlayer)
    return list(found.values())


def _inner(layer) -> Iterator[Layer]:
    for name, value in vars(layer).items():
        if name != "input_layer":
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, (list, tuple, dict)) else [value]
            yield from (each for each in values if isinstance(each, Layer))


def get_params(layers: Sequence[Layer]) -> tuple[list[Any], list[str]]:
    """Return the parameters of layers, each once, and 'W' or 'b' for each.

    >>> from synkhronos.rules.compatible.models.layers2 import FC, Softmax
    >>> last = Softmax(FC(T.matrix(), input_shape=(4, 3), n_out=5), n_out=2)
    >>> params, weight_types = get_params(get_layers(last))
    >>> weight_types
    ['W', 'b', 'W', 'b']
    """
    found: dict[Any, str] = {}
    for layer in layers:
        for each in [*_inner(layer), layer]:
            found.update(zip(each.params, each.weight_type))
    return list(found), list(found.values())


def get_statistics(layers: Sequence[Layer]) -> list[Any]:
    """Return the running means and variances of batch normalizations: no parameters."""
    found: dict[Any, None] = {}
    for layer in layers:
        for each in [*_inner(layer), layer]:
            found.update(dict.fromkeys(getattr(each, "statistics", ())))
    return list(found)


def count_params(params: Sequence[Any], verbose: bool = True) -> int:
    """Return how many numbers parameters have; print it if `verbose`."""
    total = int(sum(np.prod(each.get_value(borrow=True).shape) for each in params))
    if verbose:
        tell(f"model size {total / 1e6:.3f} M floats")
    return total


def extract_weight_types(params: Sequence[Any]) -> list[str]:
    """Return 'W' for each parameter of two dimensions or more, 'b' for others."""
    return ["W" if each.ndim > 1 else "b" for each in params]
