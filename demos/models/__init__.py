"""Model files in Theano-MPI's contract, for BSP, EASGD, GOSGD and ASGD."""
