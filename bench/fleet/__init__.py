"""Simulated fleets: goodput of layouts, worth of policies, and the simulation compared with measured meshes."""
