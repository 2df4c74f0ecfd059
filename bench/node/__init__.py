"""Ranks of DeepSeek-R1 on the GPUs of one host, against the floor of their bytes, FLOPs and wires."""
