"""Data sets in Theano-MPI's contract: CIFAR-10, ImageNet, MNIST and IMDB."""

from synkhronos.rules.compatible.models.data.cifar10 import Cifar10_data
from synkhronos.rules.compatible.models.data.imagenet import ImageNet_data
from synkhronos.rules.compatible.models.data.imdb import IMDB_data
from synkhronos.rules.compatible.models.data.mnist import MNIST_data

__all__ = ["Cifar10_data", "IMDB_data", "ImageNet_data", "MNIST_data"]
