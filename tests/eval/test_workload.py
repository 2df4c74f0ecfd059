from collections import Counter
from functools import cache
from itertools import islice

from eval.workload import FACT, LONGEST_DOCUMENT, MOST_TURNS, Chat, task_chats


def chats(count: int, seed: int = 0) -> list[Chat]:
    return list(islice(task_chats(seed), count))


@cache
def many() -> list[Chat]:
    """The first 600 chats."""
    return chats(600)


def text(chat: Chat) -> str:
    return "".join(f"<{message.role}>{message.content}" for message in chat.messages)


def test_equal_seeds_give_equal_chats_and_others_do_not() -> None:
    assert chats(20) == chats(20)
    assert not {text(chat) for chat in chats(20)} & {text(chat) for chat in chats(20, seed=1)}


def test_every_chat_ends_with_a_question_and_its_turns_alternate() -> None:
    for chat in many()[:300]:
        roles = [message.role for message in chat.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert turns.count("user") <= MOST_TURNS
        assert all(message.content for message in chat.messages)
        assert chat.max_tokens > 1


def test_few_chats_are_sent_twice() -> None:
    assert len({text(chat) for chat in many()[:300]}) >= 270


def test_much_of_the_prompts_was_sent_before() -> None:
    sent: set[str] = set()
    shared = total = 0
    for chat in many()[:400]:
        prompt = text(chat)
        total += len(prompt)
        # In blocks of about 64 tokens, as a prefix cache would find them.
        ends = range(256, len(prompt), 256)
        shared += 256 * sum(prompt[:end] in sent for end in ends)
        sent.update(prompt[:end] for end in ends)
    assert 0.4 < shared / total < 0.95


def test_few_applications_get_most_of_the_requests() -> None:
    systems = Counter(chat.messages[0].content for chat in many() if chat.messages[0].role == "system")
    assert 5 < len(systems) <= 12
    assert systems.most_common(1)[0][1] > 4 * min(systems.values())


def test_lengths_spread_over_two_orders_of_magnitude() -> None:
    lengths = sorted(len(text(chat)) for chat in many()[:400])
    assert lengths[20] < 200
    assert lengths[-20] > 4000
    assert lengths[-1] < 2 * LONGEST_DOCUMENT


def test_a_question_about_a_document_has_its_answer_in_it() -> None:
    asked = [chat.messages[0].content for chat in many()[:300] if len(chat.messages[0].content) > 1500]
    documents = [content.rpartition("\n\n") for content in asked if "access code of" in content.rpartition("\n\n")[2]]
    assert len({document for document, _, _ in documents}) < len(documents), "a document is asked about again"
    for document, _, question in documents:
        owner = question.removesuffix(".").removesuffix("?").partition("access code of ")[2]
        assert owner in dict(FACT.findall(document))
