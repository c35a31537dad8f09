"""A wide residual network for CIFAR-10, of Keras' layers, in Theano-MPI's contract.

Keras updates the parameters, by Adam, so BSP takes it with sync type avg.

References
----------
Zagoruyko and Komodakis, "Wide residual networks", arXiv:1605.07146: WRN-28-4, with dropout.
"""

import os

os.environ["KERAS_BACKEND"] = "theano"  # Keras reads it when it is imported

import keras
import numpy as np
from keras.layers import Activation, Add, BatchNormalization, Conv2D, Dense, Dropout, Input
from theanompi.models.data import Cifar10_data
from theanompi.models.model import Model, refuse_cdd

keras.backend.set_floatx("float32")


class Wide_ResNet(Model):
    """Three stages of wide blocks, with dropout in each."""

    n_epochs = 90
    batch_size = 128
    learning_rate = 0.001
    lr_step = (50, 70, 90)
    blocks = 4  # of each of the three stages
    widen = 4  # times as many channels as a ResNet has
    dropout = 0.3

    def make_data(self):
        return Cifar10_data(self.verbose)

    def build(self):
        np.random.seed(self.seed)  # of Keras' first weights
        images = Input((3, 32, 32))
        layer = convolution(images, 16)
        for stage in range(3):
            for number in range(self.blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                layer = self.block(layer, 16 * self.widen * 2**stage, stride)
        layer = keras.layers.GlobalAveragePooling2D("channels_first")(activated(layer))
        layer = Dense(self.data.n_class, activation="softmax")(layer)
        self.model = keras.models.Model(images, layer)
        self.params = list(self.model.trainable_weights)
        self.statistics = list(self.model.non_trainable_weights)

    def block(self, layer, width, stride):
        """Add a block: two convolutions beside a shortcut."""
        shortcut, layer = layer, activated(layer)
        if stride > 1 or shortcut._keras_shape[1] != width:
            shortcut = convolution(layer, width, 1, stride)
        layer = Dropout(self.dropout)(activated(convolution(layer, width, 3, stride)))
        return Add()([convolution(layer, width), shortcut])

    def compile_iter_fns(self, *args, **kwargs):
        refuse_cdd(self, kwargs.get("sync_type"))
        optimizer = keras.optimizers.Adam(self.learning_rate)
        loss = "sparse_categorical_crossentropy"
        self.model.compile(optimizer, loss, metrics=["accuracy", top5])
        self.shared_lr = optimizer.lr
        # Rules don't average an optimizer's state: each rank keeps its own.
        self.model._make_train_function()
        self.model._make_test_function()

    def load(self, mode, number):
        images, self.labels = self.data.batch(mode, number)
        self.images = images / np.float32(255)

    def part(self, number):
        """Return images and labels of a sub-batch."""
        bounds = [each * len(self.labels) // self.n_subb for each in (number, number + 1)]
        return self.images[slice(*bounds)], self.labels[slice(*bounds)]

    def train_batch(self, part):
        cost, accuracy, _ = self.model.train_on_batch(*self.part(part))
        return cost, 1 - accuracy

    def val_batch(self, part):
        cost, accuracy, found = self.model.test_on_batch(*self.part(part))
        return cost, 1 - accuracy, 1 - found


def top5(labels, probabilities):
    """Return whether each label is among the five that are most probable."""
    return keras.metrics.sparse_top_k_categorical_accuracy(labels, probabilities, k=5)


def convolution(layer, width, size=3, stride=1):
    """Return the convolution of a layer, padded to the same size."""
    return Conv2D(
        width,
        size,
        strides=stride,
        padding="same",
        data_format="channels_first",
        kernel_initializer="he_normal",
        use_bias=False,
    )(layer)


def activated(layer):
    """Return a layer after batch normalization and a rectifier."""
    return Activation("relu")(BatchNormalization(axis=1)(layer))
