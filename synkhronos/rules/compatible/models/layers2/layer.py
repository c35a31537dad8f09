"""`Layer`, the base of all layers, and the functions that walk over layers."""

from __future__ import annotations

import sys
from typing import Any, Iterator, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams

from synkhronos.rules.compatible.models.layers2.weights import Weight, own

WEIGHTS = ("W", "W0", "W1", "b", "b0", "b1", "gamma", "beta")
_LARGEST = 2**31 - 1
is_verbose = True  # whether layers print their shapes in this process
_first = own.randint(0, _LARGEST)  # a seed of its own for streams, as in Theano-MPI
_own_streams = MRG_RandomStreams(_first)
_seeds = np.random.RandomState(_first)  # of the random streams, in the order of layers
_seeded_with: Any = _first


def set_seed(seed: int) -> None:
    """Seed the weights and the random streams of layers that are made from now on.

    A random state that a script has assigned to ``layers2.rng`` stays as it is.
    """
    global _seeded_with
    own.seed(seed)
    _seeded_with = None
    _layers2().seed_this = own.randint(0, _LARGEST)


def set_verbose(verbose: bool) -> None:
    """Let layers print their shapes, or not: of several ranks one prints."""
    global is_verbose
    is_verbose = verbose


def _layers2():
    """Return the module whose globals scripts assign to: ``rng``, ``seed_this`` and ``MRG``."""
    from synkhronos.rules.compatible.models import layers2

    return layers2


def new_stream(of_script: bool = False) -> MRG_RandomStreams:
    """Return random streams for one layer, the same in each process that makes the same layers.

    They follow from ``layers2.seed_this``. With `of_script` they are ``layers2.MRG``, if a script
    has assigned streams to it.
    """
    global _seeded_with
    layers2 = _layers2()
    if of_script and layers2.MRG is not _own_streams:
        return layers2.MRG
    if _seeded_with != layers2.seed_this:
        _seeded_with = layers2.seed_this
        _seeds.seed(int(_seeded_with) % 2**32)
    return MRG_RandomStreams(int(_seeds.randint(1, 2**30)))


def relu(x: Any) -> Any:
    """Return max(x, 0)."""
    return T.nnet.relu(x)


class Layer:
    """A layer: an expression of its input, and its weights.

    A layer of a model file derives from it, and calls `get_input_shape`, sets ``output``, and calls
    `get_output_shape` and `print_shape`; it need not call this constructor.

    Parameters
    ----------
    input : Layer or symbolic variable, optional
        The layer before, or what the first layer takes.
    input_shape : tuple of int, optional
        Needed where `input` is no layer.
    printinfo : bool, optional
        Whether to print the shapes.

    Attributes
    ----------
    input_layer : Layer or None
    input, output : symbolic variable
    input_shape, output_shape : tuple of int
    params, weight_type : lists
        The shared variables, and 'W' or 'b' for each.
    layout : str or None
        "bc01" or "c01b" for images, as far as the layer knows it.
    """

    input_layer: Any = None
    input_shape: Any
    output: Any
    output_shape: Any
    layout: str | None = None
    name = ""
    printinfo = False

    def __init__(self, input: Any = None, input_shape: Any = None, printinfo: bool = True):
        self.name = self.name or type(self).__name__
        self.printinfo = printinfo
        self.params: list[Any] = []
        self.weight_type: list[str] = []
        if input is None:
            return
        if input_shape is None and not hasattr(input, "output"):
            raise TypeError(
                f"{type(self).__name__} needs input_shape, as its input is no layer of layers2."
            )
        self.get_input_shape(input, input_shape)
        self.input_shape = tuple(int(n) for n in self.input_shape)
        if input_shape is not None and tuple(input_shape) != self.input_shape:
            raise ValueError(
                f"input_shape of {type(self).__name__} must be {self.input_shape}, the shape of "
                f"the layer before, got {tuple(input_shape)}."
            )

    def get_input_shape(self, input: Any, input_shape: Any) -> None:
        """Set ``input``, ``input_shape`` and ``input_layer``, from a layer or a variable."""
        if hasattr(input, "output"):
            self.input_layer, self.input = input, input.output
            self.input_shape = tuple(input.output_shape)
        elif input_shape is not None:
            self.input, self.input_shape = input, input_shape
        else:
            raise AttributeError(
                f"the input of {type(self).__name__} must be a layer, or input_shape must be given."
            )

    def get_output_shape(self, input_shape: Any) -> tuple[int, ...]:
        """Return the shape of ``output`` for an input of a shape.

        The output isn't computed: Theano infers its shape.
        """
        mode = theano.Mode(linker="py", optimizer="fast_run")
        shape_of = theano.function([self.input], self.output.shape, mode=mode)
        found = shape_of(np.zeros(tuple(input_shape), self.input.dtype))
        return tuple(int(n) for n in found)

    def print_shape(self) -> None:
        """Print the shapes of input and output, on the rank that prints."""
        if is_verbose:
            name = self.name or type(self).__name__
            tell(f"{name}: {tuple(self.input_shape)} -> {tuple(self.output_shape)}")

    def _finish(self, output, output_shape, given=None):
        """Keep the output and its shape, or the one given; collect weights, print the shapes."""
        self.output = output
        self.output_shape = tuple(int(n) for n in (output_shape if given is None else given))
        weights = [getattr(self, name, None) for name in WEIGHTS]
        self.params = [each.val for each in weights if isinstance(each, Weight)]
        self.weight_type = extract_weight_types(self.params)
        if self.printinfo:
            self.print_shape()


def layout_of(layer: Any) -> str | None:
    """Return the layout of a layer's images: its own, or that of the layers before it."""
    while layer is not None and getattr(layer, "layout", None) is None:
        layer = getattr(layer, "input_layer", None)
    return layer.layout if layer is not None else None


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
        before = getattr(layer, "input_layer", None)
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
    >>> first = FC(T.matrix(), 5, input_shape=(4, 3), printinfo=False)
    >>> last = Softmax(first, n_out=2, printinfo=False)
    >>> params, weight_types = get_params(get_layers(last))
    >>> weight_types
    ['W', 'b', 'W', 'b']
    """
    found: dict[Any, str] = {}
    for layer in layers:
        for each in [*_inner(layer), layer]:
            params = getattr(each, "params", ())
            kinds = getattr(each, "weight_type", None) or extract_weight_types(params)
            found.update(zip(params, kinds))
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
