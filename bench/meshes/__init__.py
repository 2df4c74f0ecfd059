"""Whole meshes for benches, and what their processes use."""
