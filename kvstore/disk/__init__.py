"""The second tier of a store: blocks in a preallocated file."""
