"""A least-squares GAN for MNIST or CIFAR-10, of Lasagne's layers, in Theano-MPI's contract.

The critic learns real images to be b and generated ones to be a; the generator learns to make
images that the critic takes for c. Both learn from each batch, and update their parameters
themselves, so BSP takes it with sync type avg; or with swap, so that generators meet the critics of
other ranks (generative adversarial parallelization).

References
----------
Mao et al., "Least squares generative adversarial networks", arXiv:1611.04076.
Im, Ma, Kim and Taylor, "Generative adversarial parallelization", arXiv:1612.04021.
"""

import theano
import theano.tensor as T
from theanompi.models.model import refuse_cdd

from synkhronos.rules.compatible.zoo.adversarial import Adversarial, rmsprop


class LSGAN(Adversarial):
    """The critic and the generator learn from each batch, by squared distances."""

    learning_rate = 1e-4
    a, b, c = 0.0, 1.0, 1.0

    def costs(self):
        """Return the cost of the critic, and that of the generator."""
        real, generated = self.scores
        critic_cost = T.sqr(real - self.b).mean() + T.sqr(generated - self.a).mean()
        return critic_cost / 2, T.sqr(generated - self.c).mean() / 2

    def compile_iter_fns(self, *args, **kwargs):
        refuse_cdd(self, kwargs.get("sync_type"))
        costs = self.costs()
        updates = []
        for cost, params in zip(costs, (self.critic_params, self.generator_params)):
            updates += rmsprop(cost, params, self.shared_lr)
        self.train_fn = theano.function([self.images], list(costs), updates=updates)
        self.val_fn = theano.function([self.images], list(costs))
        self.compile_sampling()

    def train_batch(self, part):
        return self.train_fn(self.part(part))

    def val_batch(self, part):
        return [*self.val_fn(self.part(part)), 0.0]

    def print_info(self, recorder, verbose=False):
        if verbose:
            print(f"learning rate: {float(self.shared_lr.get_value()):.2e}")
