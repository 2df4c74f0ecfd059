"""KV blocks: who holds each, which prefix each continues, and which are computed now."""
