"""KV that comes to an engine and leaves it: which transfer is whose, and what its end means."""
