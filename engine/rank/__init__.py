"""The rank: the process that holds one engine."""
