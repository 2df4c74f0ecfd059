"""Chats and text as the tokens of a prompt: templates, encodings, tokenizers."""
