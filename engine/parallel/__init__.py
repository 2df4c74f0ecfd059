"""How the ranks of a worker divide a model and keep step. Without torch; tensors go through engine.exchange."""
