"""Which rank holds which routed experts, by how many tokens choose them (EPLB, DeepSeek, 2025)."""
