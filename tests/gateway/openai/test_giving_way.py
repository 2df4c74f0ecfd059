"""Which connections give way to new ones."""

from gateway.openai.giving_way import GivingWay


def test_the_one_that_has_been_idle_for_longest_gives_way() -> None:
    connections = GivingWay[str]()
    for each in "abc":
        connections.note(each, idle=True, reading=False)
    # It has a request, then is idle again.
    connections.note("a", idle=False, reading=False)
    assert connections.longest_idle() == "b"
    connections.note("a", idle=True, reading=False)
    connections.lost("b")
    assert connections.longest_idle() == "c"
    connections.closes("c")
    assert connections.longest_idle() == "a"


def test_a_request_that_is_not_whole_ages_from_its_beginning() -> None:
    connections = GivingWay[str]()
    for each in ("a", "b", "a"):
        connections.note(each, idle=False, reading=True)
    assert connections.longest_idle() is None and connections.longest_reading() == "a"
    connections.note("a", idle=False, reading=False)
    assert connections.longest_reading() == "b"


def test_connections_count_as_closing_until_they_are_lost() -> None:
    connections = GivingWay[str]()
    connections.note("a", idle=True, reading=False)
    connections.closes("a")
    connections.closes("a")
    assert connections.closing == 1
    connections.lost("a")
    assert connections.closing == 0
