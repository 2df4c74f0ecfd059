"""What the mesh adds to the engine."""
