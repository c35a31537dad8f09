"""A least-squares GAN for CIFAR-10: that of lsgan.py, with other settings."""

from theanompi.models.lasagne_model_zoo import lsgan


class LSGAN(lsgan.LSGAN):
    batch_size = 128
    data_set = "cifar10"
