"""Theano-MPI's rules: training by a process of mpirun for each device."""
