"""Seconds of each policy: `python -m bench.fleet.policies` has those that say something."""

from pathlib import Path

import pytest

from bench.fleet.policies import POLICIES, Policy, kept, line, ran, refused


@pytest.mark.parametrize("policy", POLICIES, ids=[f"{policy.name}, {policy.where}" for policy in POLICIES])
def test_a_policy_is_switched_off_for_the_same_requests(policy: Policy, tmp_path: Path) -> None:
    on, off = (ran(policy, each, seed=3, seconds=0.75, folder=tmp_path) for each in (True, False))
    assert on and off
    # Another turn comes when the one before it has ended.
    if "turns" not in policy.workload:
        assert [each.scheduled_s for each in on.values()] == [off[number].scheduled_s for number in on]
    assert line(policy, [kept(on)], [kept(off)]).startswith(f"| {policy.name} | {policy.where} |")


def test_refused_requests_are_looked_up_where_nobody_is_refused(tmp_path: Path) -> None:
    on, off = (ran(POLICIES[0], each, seed=0, seconds=1.0, folder=tmp_path) for each in (True, False))
    first, second, *_ = on
    for number in (first, second):
        on[number].fail("overloaded", "")
    off[second].fail("missed", "")
    assert refused([on], [off]).startswith("1 of 2 ")
