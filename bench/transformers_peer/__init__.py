"""deepmesh and transformers on the same checkpoint."""
