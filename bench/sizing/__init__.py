"""What a model needs of GPUs, and what it will do on them: `deepmesh plan`."""
