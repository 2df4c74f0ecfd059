"""The ranks of a worker, seen from the service's process: started, called, watched."""
