"""tiny-r1, a reasoning model of DeepSeek's architecture with 16 million parameters: `tiny-r1/` is its checkpoint."""
