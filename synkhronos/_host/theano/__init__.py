"""Theano 1.0.5 as the host library: all that imports Theano, but for what users build graphs with.

Importing this package imports no Theano: `import_support` must come before Theano does.
"""
