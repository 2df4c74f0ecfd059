"""Memory that the mesh holds and that loading takes."""
