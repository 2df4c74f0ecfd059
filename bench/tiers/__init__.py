"""Where the KV of a rank may lie, and what it costs to move it."""
