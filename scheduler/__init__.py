"""Registry of workers and placement of requests."""
