"""Fetches of prefixes from a store: the worker's side and the store's side."""
