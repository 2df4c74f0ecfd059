"""What gateways and ranks know of text alike: tokenizers' files, and grammars within bounds."""
