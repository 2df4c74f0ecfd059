import pytest

from mesh.rank_choice import TOKENS_A_REQUEST, RankOutlook, choose_rank


def outlook(
    live: int = 0, queued: int = 0, free: int = 1000, cached: int = 0, pending: int = 0, host: int = 0
) -> RankOutlook:
    return RankOutlook(live, queued, free, cached, pending, host)


def choose(
    *ranks: RankOutlook, tokens: int = 640, computes: bool = True, requests: int = 8, booked: int | None = None
) -> int:
    return choose_rank(ranks, tokens, computes, requests, booked)


def test_of_idle_ranks_the_first_is_chosen() -> None:
    assert choose(outlook(), outlook(), outlook()) == 0


def test_the_rank_with_the_fewest_requests_is_chosen() -> None:
    assert choose(outlook(live=2), outlook(live=1), outlook(live=3)) == 1


def test_prompts_that_wait_count_by_their_tokens() -> None:
    assert choose(outlook(queued=5000), outlook(live=3)) == 1


def test_a_cached_prefix_outweighs_a_little_more_work() -> None:
    assert choose(outlook(live=5, cached=10), outlook()) == 0


def test_a_cached_prefix_does_not_outweigh_the_work_before_it() -> None:
    work = 640 // TOKENS_A_REQUEST + 1
    assert choose(outlook(live=work, cached=10), outlook(), requests=100) == 1


def test_a_remote_prompt_follows_its_prefix_only_among_equals() -> None:
    assert choose(outlook(), outlook(cached=9), computes=False) == 1
    assert choose(outlook(), outlook(live=1, cached=9), computes=False) == 0


def test_a_rank_where_it_would_wait_is_the_last_resort() -> None:
    assert choose(outlook(free=9), outlook(live=7)) == 1
    assert choose(outlook(live=8), outlook(live=7, queued=100_000)) == 1
    assert choose(outlook(live=9), outlook(live=8)) == 1


def test_a_request_does_not_overtake_those_that_wait_for_blocks() -> None:
    assert choose(outlook(live=1, free=20), outlook(live=3)) == 0
    assert choose(outlook(live=1, free=20, pending=9), outlook(live=3)) == 1


def test_each_request_needs_a_block_to_grow_by() -> None:
    """The prompt takes 11 blocks with the first token."""
    assert choose(outlook(live=3, free=14), outlook(live=4)) == 0
    assert choose(outlook(live=3, free=13), outlook(live=4)) == 1


def test_among_full_ranks_the_fewest_lacking_blocks_win() -> None:
    assert choose(outlook(free=5, pending=80), outlook(live=5, free=5, pending=30)) == 1


def test_blocks_that_a_rank_has_need_no_room() -> None:
    assert choose(outlook(free=2, cached=9), outlook(live=1)) == 0


def test_blocks_in_host_memory_save_work_but_need_room() -> None:
    assert choose(outlook(cached=4), outlook(cached=1, host=5)) == 1
    assert choose(outlook(free=2, host=9), outlook(live=1)) == 1


def test_a_booked_rank_stays_unless_another_has_much_less_work() -> None:
    work = 320 + TOKENS_A_REQUEST
    assert choose(outlook(), outlook(queued=work), booked=1) == 1
    assert choose(outlook(), outlook(queued=work + 1), booked=1) == 0


def test_a_remote_prompt_stays_on_its_rank_within_one_request() -> None:
    assert choose(outlook(live=1), outlook(live=2), computes=False, booked=1) == 1
    assert choose(outlook(live=1), outlook(live=3), computes=False, booked=1) == 0


def test_a_rank_with_the_prefix_replaces_a_booked_one() -> None:
    assert choose(outlook(cached=9), outlook(), booked=1) == 0


def test_a_booked_rank_with_a_wait_yields_to_one_without() -> None:
    assert choose(outlook(live=7), outlook(live=8), booked=1) == 0
    assert choose(outlook(live=7), outlook(free=9), booked=1) == 0
    assert choose(outlook(live=8), outlook(live=9), booked=1) == 1


@pytest.mark.parametrize("booked", [2, 2**32 - 1])
def test_a_booked_rank_beyond_the_workers_is_ignored(booked: int) -> None:
    assert choose(outlook(live=1), outlook(), booked=booked) == 1
