"""Commands that make the checkpoints and tokenizers that the services serve."""
