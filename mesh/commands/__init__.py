"""The commands of `deepmesh`, one a module. What a command alone needs it imports inside its functions."""
