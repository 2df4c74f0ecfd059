"""Prefixes fetched from a store: the worker's side and the store's."""
