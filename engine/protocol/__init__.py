"""The messages between a service and its rank."""
