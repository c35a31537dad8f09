"""The modules of Theano-MPI that model files import, under its names."""
