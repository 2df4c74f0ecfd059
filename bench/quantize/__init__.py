"""What quantizing a checkpoint of DeepSeek-R1's shape, and loading the result, take."""
