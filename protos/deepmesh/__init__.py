"""Contracts of deepmesh."""
