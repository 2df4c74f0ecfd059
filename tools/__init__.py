"""Commands that make what the services serve."""
