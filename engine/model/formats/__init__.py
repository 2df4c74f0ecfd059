"""The forms in which linear weights are kept, each behind the same interface."""
