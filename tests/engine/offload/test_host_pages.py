"""Host memory that a GPU copies from."""

import logging

import pytest
import torch

from engine.offload.host_pages import HostPages, prefer_near


def test_a_node_that_is_not_there_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostPages(1 << 20, page_locked=False).tensor
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        prefer_near(memory, 500)
    (record,) = caplog.records
    assert "far from its GPU" in record.message


@pytest.mark.gpu
def test_locked_pages_are_page_locked() -> None:
    # They are locked as long as there is the object.
    pages = HostPages(1 << 20, page_locked=True)
    assert pages.tensor.is_pinned() and not torch.any(pages.tensor)
