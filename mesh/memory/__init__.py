"""A machine's memory: how much there is, in which pages and nodes, and giving it back."""
