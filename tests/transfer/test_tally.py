from transfer.tally import Tally


def test_names_add_up() -> None:
    tally = Tally()
    for name, count in (("tcp", 5), ("posix", 1), ("tcp", 7)):
        tally.add(name, count)
    assert tally.counts == {"tcp": 12, "posix": 1}


def test_what_was_read_stays_as_it_was() -> None:
    tally = Tally()
    tally.add("tcp", 5)
    before = tally.counts
    tally.add("tcp", 5)
    tally.add("posix", 5)
    assert before == {"tcp": 5}
