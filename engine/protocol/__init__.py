"""What a service and its rank say to each other."""
