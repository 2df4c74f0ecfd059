"""From files, or from nothing, to weights."""
