"""The `deepmesh` command."""
