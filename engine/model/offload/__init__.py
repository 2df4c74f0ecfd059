"""Layers whose experts lie in host memory."""
