"""Workers whose ranks lie on several hosts: how the hosts' services find one another, and what they exchange."""
