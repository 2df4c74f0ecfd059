"""Open-loop load against any endpoint: what `deepmesh bench` runs."""
