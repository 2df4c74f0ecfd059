"""Answers that a grammar constrains: what each may go on with, made beside the steps."""
