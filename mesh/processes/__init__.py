"""Processes: started so that they end with their parents, stopped by signals, and their exit status."""
