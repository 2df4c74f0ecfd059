"""Schedulers and decode workers, and the calls to them."""
