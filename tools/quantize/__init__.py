"""Makes a quantized checkpoint from another one, layer by layer."""
