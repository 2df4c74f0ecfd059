"""The KV-cache center: blocks beyond the workers, in host memory; workers look up and fetch over UCX. Torch-free."""
