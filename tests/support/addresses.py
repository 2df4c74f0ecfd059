"""Addresses at which nothing listens, for tests that need one."""

# A privileged port on which no mesh ever listens: connections are refused at once.
NOWHERE = "127.0.0.1:1"
