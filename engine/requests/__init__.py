"""Requests of a rank: what was asked, how far each is, and what goes back."""
