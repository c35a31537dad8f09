"""Data sets of model files: ``theanompi.models.data``."""
