"""A decode worker: a request from acceptance to its last token."""
