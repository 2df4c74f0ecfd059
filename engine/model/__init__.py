"""The DeepSeek V3/R1 architecture."""
