"""Tensors between the GPUs of a group of ranks, through memory that each rank maps of the others."""
