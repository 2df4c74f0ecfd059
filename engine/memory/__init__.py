"""How a rank's memory is divided: weights, KV pool, workspace, graphs."""
