"""Times exchange between the GPUs of one host, beside NCCL."""
