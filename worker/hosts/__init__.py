"""A worker whose ranks lie on several hosts: how its services come together, and what goes between them."""
