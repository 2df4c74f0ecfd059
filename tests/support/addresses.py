"""Addresses for tests that need one and must reach nobody."""

# Privileged, and no mesh is ever told to listen there: connections are refused at once.
NOWHERE = "127.0.0.1:1"
