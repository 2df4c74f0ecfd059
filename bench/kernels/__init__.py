"""Compares kernels with the ceilings of the device and with vendor packages: `python -m bench.kernels`."""
