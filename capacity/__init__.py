"""Which GPUs a model needs, and how fast it will be on them: `deepmesh plan`."""
