"""Makes a quantized checkpoint of another one, layer by layer."""
