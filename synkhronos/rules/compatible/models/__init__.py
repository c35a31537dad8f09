"""``theanompi.models``: layers and data sets for model files."""
