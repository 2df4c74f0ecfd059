"""Routed experts in host memory, brought to the GPU while earlier layers compute: which, and in which order."""
