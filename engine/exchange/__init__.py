"""Tensors between the ranks of a worker."""
