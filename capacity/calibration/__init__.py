"""Makes cost files (see `mesh.costs`) from measurements."""
