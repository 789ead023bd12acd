"""Token bucket: bursts, refill, and its equality with a count of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticjob_rendezvous.token_bucket import TokenBucket


def test_full_bucket_gives_its_size_at_once_and_then_one_token_an_interval() -> None:
    bucket = TokenBucket(3, 10.0)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.available_at == 110.0
    assert not bucket.take(109.9)
    assert bucket.take(110.0)
    assert not bucket.take(110.0)


def test_unused_bucket_is_full_again_and_no_more() -> None:
    bucket = TokenBucket(2, 1.0)
    assert bucket.is_full(0.0)
    bucket.take(0.0)
    assert not bucket.is_full(0.5)
    assert bucket.is_full(1.0)
    assert [bucket.take(1000.0) for _ in range(3)] == [True, True, False]


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_bucket_equals_a_count_of_tokens(steps: list[int], size: int) -> None:
    bucket, now, tokens, refill = TokenBucket(size, 8.0), 0, size * 8, 8
    for step in steps:
        now += step
        tokens = min(tokens + step, size * refill)  # in eighths
        given = tokens >= refill
        tokens -= refill * given
        assert bucket.take(float(now)) is given
