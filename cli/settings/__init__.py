"""The configuration of every service as users see it: its keys, checks before a start, and the page in docs/."""
