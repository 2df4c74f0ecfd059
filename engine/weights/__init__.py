"""Weights, read from files or drawn at random."""
