"""Measures a model's quality by tasks whose answers can be checked."""
