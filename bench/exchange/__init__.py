"""Times exchange between the GPUs of one host, and NCCL's."""
