"""A Wasserstein GAN for MNIST, of Lasagne's layers, in Theano-MPI's contract.

The critic learns from each batch. The generator learns after every second one; in the beginning,
and after each hundredth of its updates, after 50 batches, so that the critic is near its optimum.
Both update their parameters themselves, so BSP takes it with sync type avg, or swap.

References
----------
Arjovsky, Chintala and Bottou, "Wasserstein GAN", arXiv:1701.07875.
"""

import theano
import theano.tensor as T
from theanompi.models.model import refuse_cdd

from synkhronos.rules.compatible.zoo.adversarial import Adversarial, rmsprop


class WGAN(Adversarial):
    """The critic learns from each batch, the generator when the critic is near its optimum."""

    learning_rate = 5e-5
    clip = 0.01  # of the critic's parameters
    critic_steps = 2
    critic_steps_at_first = 50

    def build(self):
        super().build()
        self.generator_updates = self.steps_since = 0
        self.generator_cost = 0.0

    def costs(self):
        """Return the cost of the critic, and that of the generator."""
        real, generated = self.scores
        return generated.mean() - real.mean(), -generated.mean()

    def compile_iter_fns(self, *args, **kwargs):
        refuse_cdd(self, kwargs.get("sync_type"))
        critic_cost, generator_cost = self.costs()
        updates = rmsprop(critic_cost, self.critic_params, self.shared_lr)
        if self.clip:
            updates = [
                (variable, T.clip(new, -self.clip, self.clip))
                if variable in self.critic_params
                else (variable, new)
                for variable, new in updates
            ]
        self.critic_fn = theano.function([self.images], critic_cost, updates=updates)
        updates = rmsprop(generator_cost, self.generator_params, self.shared_lr)
        rows, images = self.compile_sampling()
        self.generator_fn = theano.function(
            [rows], generator_cost, updates=updates, givens={self.images: images}
        )
        self.val_fn = theano.function([self.images], [critic_cost, generator_cost])

    def train_batch(self, part):
        """Update the critic, and the generator when it is due; return the cost of each."""
        images = self.part(part)
        critic_cost = self.critic_fn(images)
        self.steps_since += 1
        at_first = self.generator_updates < 5 or self.generator_updates % 100 == 0
        if self.steps_since >= (self.critic_steps_at_first if at_first else self.critic_steps):
            self.generator_cost = float(self.generator_fn(len(images)))
            self.generator_updates += 1
            self.steps_since = 0
        return critic_cost, self.generator_cost

    def val_batch(self, part):
        critic_cost, generator_cost = self.val_fn(self.part(part))
        return critic_cost, generator_cost, 0.0

    def adjust_hyperp(self, epoch):
        """Let the learning rate fall in the second half, in a line to zero."""

        def share(number):
            return min(1.0, 2 * (1 - number / self.n_epochs))

        if epoch < self.n_epochs:
            self.scale_lr(max(share(epoch + 1), 0.0) / share(epoch))

    def print_info(self, recorder, verbose=False):
        if verbose:
            print(f"updates of the generator: {self.generator_updates}")
