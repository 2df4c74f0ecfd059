"""Drafts of MTP modules: how many, made and verified in which passes, captured in graphs."""
