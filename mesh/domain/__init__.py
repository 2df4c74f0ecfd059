"""What all services speak of: sampling, outputs, targets, workers; and the one translation of each to the protos."""
