"""A backend without a model, whose tokens depend on the KV that it reads."""
