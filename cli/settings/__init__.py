"""The configuration of every service, as its user sees it: keys, checks before a start, the page in docs/."""
