"""deepmesh beside transformers on the same checkpoint."""
