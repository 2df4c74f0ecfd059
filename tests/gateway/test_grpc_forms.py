"""Answers of a form over gRPC."""

import grpc
import pytest
from deepmesh.v1 import common_pb2, gateway_pb2

from tests.support.gateways import chat_request, collect, running_mesh

FORMS = [
    gateway_pb2.AnswerForm(json_schema='{"type": "object"}'),
    gateway_pb2.AnswerForm(json_object=gateway_pb2.AnyJsonObject()),
    gateway_pb2.AnswerForm(regex="a+"),
    gateway_pb2.AnswerForm(choice=gateway_pb2.Choices(texts=["a", "b"])),
    gateway_pb2.AnswerForm(grammar='start: "a"'),
]


async def test_every_form_reaches_the_worker_as_a_grammar() -> None:
    async with running_mesh() as mesh:
        for form in FORMS:
            await collect(mesh, chat_request(max_tokens=2, form=form))
            submission = mesh.worker.submissions[-1]
            assert submission.constraint.grammar
            # Relaxed ones would suit thoughts alone, and are for those who ask for them.
            assert submission.sampling.drafts == common_pb2.DRAFT_USE_STRICT


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (gateway_pb2.AnswerForm(json_schema="{"), "form.json_schema"),
        (gateway_pb2.AnswerForm(regex="("), "form.regex"),
        (gateway_pb2.AnswerForm(), "form"),
    ],
)
async def test_a_form_that_is_none_is_refused_by_its_field(form: gateway_pb2.AnswerForm, field: str) -> None:
    async with running_mesh() as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh, chat_request(form=form))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field.encode() in dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
