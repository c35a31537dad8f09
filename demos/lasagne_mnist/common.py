"""Names that the demos of 2017 imported from here."""

from demos.lasagne_mnist.data import load_dataset
from demos.lasagne_mnist.networks import build_network

__all__ = ["build_network", "load_dataset"]
