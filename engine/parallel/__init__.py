"""How the ranks of a worker divide a model and agree on steps. Without torch: engine.exchange carries tensors."""
