"""What model files of Theano-MPI import from it, under its names."""
