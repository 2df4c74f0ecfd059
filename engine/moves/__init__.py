"""KV that an engine receives and sends: which transfer is whose, and what its end means."""
