"""A least-squares GAN for CIFAR-10: that of lsgan.py, with other settings."""

from theanompi.models.lasagne_model_zoo import lsgan


class CifarLSGAN(lsgan.LSGAN):
    """`lsgan.LSGAN` for CIFAR-10, with larger batches."""

    batch_size = 128
    data_set = "cifar10"


LSGAN = CifarLSGAN  # the name in Theano-MPI
