"""Whole meshes for benches, and the resources that their processes use."""
