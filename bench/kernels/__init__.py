"""Kernels against the ceilings of the device and against vendor packages: `python -m bench.kernels`."""
