"""How families of models write tool calls: one module a format."""
