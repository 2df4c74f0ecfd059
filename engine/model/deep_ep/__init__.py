"""Rows to the experts of other hosts, and sums back, by DeepEP: one copy of a row a host, then NVLink.

UNPROVEN: written by the source of github.com/deepseek-ai/DeepEP at dd758ca, and tested against a stand-in that computes
what that documents. No build of it has run here between hosts.
"""

from engine.model.deep_ep.adapter import DeepEp, find_deep_ep
from engine.model.deep_ep.elastic import Traffic

__all__ = ["DeepEp", "Traffic", "find_deep_ep"]
