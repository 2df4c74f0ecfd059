"""Makes cost files (see `mesh.costs`) of what was measured."""
