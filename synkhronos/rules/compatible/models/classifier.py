"""``Classifier``: networks for images in classes, trained by `theanompi.lib.opt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import theano
import theano.tensor as T

from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos.rules.compatible.lib import opt
from synkhronos.rules.compatible.models import layers2
from synkhronos.rules.compatible.models.data.sources import source
from synkhronos.rules.compatible.models.model import Model


class Classifier(Model):
    """A network for images in classes, trained by momentum SGD with weight decay.

    A subclass has a method ``network(images)``, which sets ``params`` and returns the
    probabilities for training and those for validation, both of shape (rows, classes). It may set
    ``extra_cost``, ``statistics`` and ``statistics_updates``.

    Images are of shape (rows, channels, height, width). For data that are read from files with one
    batch each, ImageNet's, parts of ``input_size`` x ``input_size`` pixels are cut out.

    Examples
    --------
    >>> import os
    >>> from theano import shared, tensor
    >>> from synkhronos.rules.compatible.models.data import MNIST_data
    >>> class Linear(Classifier):
    ...     def make_data(self):
    ...         return MNIST_data()
    ...     def network(self, images):
    ...         self.params = [shared(np.zeros((784, 10), "float32"), "W")]
    ...         probabilities = tensor.nnet.softmax(images.flatten(2).dot(self.params[0]))
    ...         return probabilities, probabilities
    >>> os.environ["SYNKHRONOS_DATA"] = "made"
    >>> model = Linear({"batch_size": 4})
    >>> model.n_subb, model.data.n_batch_train, model.weight_types
    (1, 8, ['W'])
    >>> del os.environ["SYNKHRONOS_DATA"]
    """

    mu = 0.9
    eta = 0.0001  # weight decay
    use_momentum = True
    use_nesterov_momentum = False
    input_size = 0  # of data whose images are cropped when they are loaded
    batch_crop_mirror = False  # crop all images of a batch alike
    rand_crop = True
    # Whether another process loads them: "auto" for files, but not for made-up data.
    para_load: Any = "auto"
    no_paraload = False  # for servers, which load nothing

    extra_cost: Any = 0  # added to the cost of training

    layers: Any = None  # of layers2; snapshots of Theano-MPI have a file for each
    _is_training = True

    def preprocessing(self) -> dict[str, Any]:
        """Return keywords of `Preprocess` that differ from those of ImageNet's data."""
        return {}

    def network(self, images: Any) -> tuple[Any, Any]:
        """Return the probabilities for training and those for validation."""
        raise NotImplementedError

    def build(self) -> None:
        """Set the graphs that `opt` compiles functions of."""
        self.x = T.tensor4("x")
        self.y = T.lvector("y")
        self.lr = T.fscalar("lr")
        self.subb_ind = T.iscalar("subb")
        self.statistics_updates: list[Any] = []
        probabilities, self.probabilities = self.network(self.x)
        self.statistics = [shared for shared, _ in self.statistics_updates]
        if self.layers:
            self.statistics += layers2.get_statistics(self.layers)
        self.cost = self.cost_of(probabilities) + self.extra_cost
        self.error = self.errors(probabilities, 1)
        self.grads = recurses_deep(T.grad)(self.cost, self.params)
        self.weight_types = ["W" if param.ndim > 1 else "b" for param in self.params]
        self.shared_x = theano.shared(np.zeros((1, 1, 1, 1), theano.config.floatX), "images")
        self.shared_y = theano.shared(np.zeros(1, "int64"), "labels")
        # The last batch may have fewer rows, so they are counted in the graph.
        rows = self.shared_y.shape[0]
        part = slice(self.subb_ind * rows // self.n_subb, (self.subb_ind + 1) * rows // self.n_subb)
        self.shared_x_slice, self.shared_y_slice = self.shared_x[part], self.shared_y[part]
        self.compiled_train_fn_list: list[Any] = []
        loads = source() == "files" if self.para_load == "auto" else self.para_load
        if self.input_size and loads and not self.no_paraload:
            self.data.spawn_load()
            self.data.para_load_init(
                self.shared_x,
                self.input_size,
                self.input_size,
                self.rand_crop,
                self.batch_crop_mirror,
                **self.preprocessing(),
            )

    def cost_of(self, probabilities: Any) -> Any:
        """Return the mean negative log-likelihood of the labels."""
        return T.nnet.categorical_crossentropy(probabilities, self.y).mean()

    def errors(self, probabilities: Any, best: int) -> Any:
        """Return the fraction of rows whose label is not among the `best` likeliest classes."""
        found = probabilities[T.arange(self.y.shape[0]), self.y].dimshuffle(0, "x")
        likelier = T.gt(probabilities, found).sum(axis=1)
        return T.cast(T.ge(likelier, best), theano.config.floatX).mean()

    def compile_iter_fns(self, *args: Any, **kwargs: Any) -> None:
        """Compile the functions, by `opt.pre_model_iter_fn`."""
        opt.pre_model_iter_fn(self, self.size, sync_type=kwargs.get("sync_type"))

    def compile_train(self, *functions: dict[str, Any]) -> None:
        """Compile functions of training from keywords of `theano.function`.

        The one that computes the cost updates the running statistics too.
        """
        for keywords in functions:
            if keywords.get("outputs") and self.statistics_updates:
                updates = list(dict(keywords.get("updates") or {}).items())
                keywords = {**keywords, "updates": updates + self.statistics_updates}
            self.compiled_train_fn_list.append(theano.function(**keywords))

    def compile_val(self) -> None:
        """Compile the function that validates."""
        outputs = [
            self.cost_of(self.probabilities),
            self.errors(self.probabilities, 1),
            self.errors(self.probabilities, 5),
        ]
        givens = {self.x: self.shared_x_slice, self.y: self.shared_y_slice}
        self.val_fn = theano.function([self.subb_ind], outputs, givens=givens)

    def load(self, mode: str, number: int) -> None:
        """Put a batch of this rank into the shared variables."""
        images, labels = self.read_batch(mode, number)
        # A copy: the loader will write its next images into the same memory.
        self.shared_x.set_value(np.array(images, theano.config.floatX, order="C"), borrow=True)
        self.shared_y.set_value(labels)

    def read_batch(self, mode: str, number: int) -> tuple[Any, Any]:
        """Return images and labels of a batch of this rank."""
        if not self.input_size:
            return self.data.batch(mode, number)
        images, labels = self.data.prepared(
            mode,
            number,
            self.input_size,
            self.rand_crop,
            self.batch_crop_mirror,
            self.epoch,
            self.rank,
            **self.preprocessing(),
        )
        return images.transpose(3, 0, 1, 2), labels

    def use_layers(self, last: Any) -> tuple[Any, Any]:
        """Take the parameters of the layers of layers2 up to a last one, a Softmax.

        Their dropout, cropping and batch normalization are switched between training and
        validation, so there is one graph for both; it is returned twice.
        """
        self.layers = layers2.get_layers(last)
        self.params, _ = layers2.get_params(self.layers)
        return last.p_y_given_x, last.p_y_given_x

    def _switch(self, is_training: bool) -> None:
        if self.layers and is_training != self._is_training:
            word = "On" if is_training else "Off"
            getattr(layers2.Dropout, f"SetDropout{word}")()
            getattr(layers2.Crop, f"SetRandCrop{word}")()
            getattr(layers2.BatchNormal, f"SetTrain{word}")()
        self._is_training = is_training

    def train_batch(self, part: int) -> tuple[Any, Any]:
        """Train with a part of the loaded batch."""
        self._switch(True)
        return self.train_iter_fn(part)

    def val_batch(self, part: int) -> tuple[Any, Any, Any]:
        """Validate with a part of the loaded batch."""
        self._switch(False)
        return self.val_iter_fn(part)
