"""Changes that make Theano compile and compute faster, with the same bits: see `switch`."""
