"""Token bucket: bursts, refill, and its equality with a count of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticjob_rendezvous.token_bucket import TokenBucket, TokenBuckets


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


def test_several_tokens_are_taken_together_or_not_at_all() -> None:
    bucket = TokenBucket(10, 1.0)
    assert bucket.take(0.0, 7)
    assert not bucket.take(0.0, 4)
    assert bucket.take(0.0, 3)
    assert not bucket.take(4.9, 5)
    assert bucket.take(5.0, 5)
    assert not bucket.take(1e9, 11), "more than the bucket holds"


def test_bucket_of_a_key_is_kept_until_it_is_full() -> None:
    buckets = TokenBuckets[str](2, 10.0)
    assert [buckets.get("a", 0.0).take(0.0) for _ in range(3)] == [True, True, False]
    assert buckets.get("b", 19.0).take(19.0)
    assert len(buckets) == 2
    buckets.get("b", 20.0)
    assert len(buckets) == 1, "that of a is full"
    buckets.get("b", 20.0).take(20.0)
    assert not buckets.get("b", 20.0).take(20.0)
    buckets.forget("b")
    assert buckets.get("b", 20.0).take(20.0)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_bucket_equals_a_count_of_tokens(steps: list[int], size: int) -> None:
    bucket, now, tokens, refill = TokenBucket(size, 8.0), 0, size * 8, 8
    for step in steps:
        now += step
        tokens = min(tokens + step, size * refill)  # in eighths
        given = tokens >= refill
        tokens -= refill * given
        assert bucket.take(float(now)) is given
