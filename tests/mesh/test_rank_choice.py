import pytest

from mesh.rank_choice import TOKENS_A_REQUEST, RankOutlook, choose_rank


def outlook(live: int = 0, queued: int = 0, free: int = 1000, cached: int = 0, pending: int = 0) -> RankOutlook:
    return RankOutlook(live, queued, free_blocks=free, cached_blocks=cached, pending_blocks=pending)


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


def test_a_cached_prefix_does_not_outweigh_the_work_that_it_would_wait_for() -> None:
    work = 640 // TOKENS_A_REQUEST + 1
    assert choose(outlook(live=work, cached=10), outlook(), requests=100) == 1


def test_a_prompt_that_another_worker_computes_goes_where_its_prefix_is_only_among_equals() -> None:
    assert choose(outlook(), outlook(cached=9), computes=False) == 1
    assert choose(outlook(), outlook(live=1, cached=9), computes=False) == 0


def test_a_rank_where_the_request_would_wait_is_the_last_resort() -> None:
    assert choose(outlook(free=9), outlook(live=7)) == 1
    assert choose(outlook(live=8), outlook(live=7, queued=100_000)) == 1
    assert choose(outlook(live=9), outlook(live=8)) == 1


def test_a_request_waits_behind_those_that_wait_for_blocks_though_its_own_are_free() -> None:
    assert choose(outlook(live=1, free=20), outlook(live=3)) == 0
    assert choose(outlook(live=1, free=20, pending=9), outlook(live=3)) == 1


def test_each_request_needs_a_block_to_grow_by() -> None:
    """The prompt takes 11 blocks with the first token."""
    assert choose(outlook(live=3, free=14), outlook(live=4)) == 0
    assert choose(outlook(live=3, free=13), outlook(live=4)) == 1


def test_of_ranks_without_room_the_one_that_lacks_the_fewest_blocks_is_chosen() -> None:
    assert choose(outlook(free=5, pending=80), outlook(live=5, free=5, pending=30)) == 1


def test_blocks_that_a_rank_has_need_no_room() -> None:
    assert choose(outlook(free=2, cached=9), outlook(live=1)) == 0


def test_the_booked_rank_is_chosen_unless_the_best_has_less_to_do_by_a_request_and_half_of_the_prompt() -> None:
    work = 320 + TOKENS_A_REQUEST
    assert choose(outlook(), outlook(queued=work), booked=1) == 1
    assert choose(outlook(), outlook(queued=work + 1), booked=1) == 0


def test_a_request_whose_prompt_another_worker_computes_goes_to_a_booked_rank_with_one_request_more() -> None:
    assert choose(outlook(live=1), outlook(live=2), computes=False, booked=1) == 1
    assert choose(outlook(live=1), outlook(live=3), computes=False, booked=1) == 0


def test_the_booked_rank_is_left_for_one_that_has_the_prefix_which_it_lost() -> None:
    assert choose(outlook(cached=9), outlook(), booked=1) == 0


def test_the_booked_rank_is_left_if_the_request_would_wait_there_alone() -> None:
    assert choose(outlook(live=7), outlook(live=8), booked=1) == 0
    assert choose(outlook(live=7), outlook(free=9), booked=1) == 0
    assert choose(outlook(live=8), outlook(live=9), booked=1) == 1


@pytest.mark.parametrize("booked", [2, 2**32 - 1])
def test_a_rank_that_the_worker_does_not_have_counts_for_nothing(booked: int) -> None:
    assert choose(outlook(live=1), outlook(), booked=booked) == 1
