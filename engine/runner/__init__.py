"""The model as a backend: weights, KV pool, and the execution of steps."""
