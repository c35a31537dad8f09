"""PyTensor as the host library. Only this folder imports PyTensor."""
