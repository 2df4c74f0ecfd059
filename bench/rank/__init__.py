"""One rank of a large model on one GPU, against the floor of its bytes and FLOPs."""
