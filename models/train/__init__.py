"""Trains tiny-r1, the small reasoning model that deepmesh ships."""
