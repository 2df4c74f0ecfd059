"""A page that shows the mesh at work, on the metrics port."""
