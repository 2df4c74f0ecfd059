"""The gateway compared with a bare relay of the same tokens."""
