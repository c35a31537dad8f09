"""Model files of this package, for BSP, EASGD, GOSGD and ASGD, in Theano-MPI's contract.

They answer to the names of Theano-MPI's models: ``theanompi.models.cifar10``,
``theanompi.models.lasagne_model_zoo.vgg16`` and others (`finder.RENAMED`). They import from
``theanompi``, so that a copy of one is a model file of its own.
"""
