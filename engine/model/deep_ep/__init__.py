"""Rows to the experts of other hosts, and sums back, by DeepEP: one copy of a row a host, then NVLink.

Written by the source of github.com/deepseek-ai/DeepEP at dd758ca, tested against a stand-in that computes what that
documents, and compared with our own exchange on two GPUs of one host. UNPROVEN between hosts.
"""

from engine.model.deep_ep.adapter import DeepEp, find_deep_ep
from engine.model.deep_ep.elastic import Traffic

__all__ = ["DeepEp", "Traffic", "find_deep_ep"]
