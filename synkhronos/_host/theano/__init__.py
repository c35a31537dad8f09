"""Theano 1.0.5 as the host library. Only this folder imports Theano.

Importing this package imports no Theano: `import_support` must come before Theano does.
"""
