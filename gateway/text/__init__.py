"""Answers as text: from tokens to what a client reads."""
