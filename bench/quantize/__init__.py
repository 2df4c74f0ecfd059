"""Time and memory of quantizing a checkpoint of DeepSeek-R1's shape and of loading the result."""
