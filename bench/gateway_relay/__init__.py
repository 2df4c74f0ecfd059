"""The gateway beside a bare relay of the same tokens."""
