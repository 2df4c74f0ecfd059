"""deepmesh beside transformers on one checkpoint."""
