"""The forms in which linear weights are kept, with one interface."""
