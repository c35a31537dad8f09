"""PyTensor 3 as the host library. Only this folder, and `extensions/pymc`, import PyTensor."""
