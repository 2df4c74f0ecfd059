"""Answers that a grammar constrains: which tokens each may go on with, found out while steps run."""
