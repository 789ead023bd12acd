"""Leader lease, against a fake API server that conflicts, fails and forgets.

Time is the event loop's own and advances as soon as all tasks wait, so the machine's load has no
effect.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from elasticjob_operator.kubernetes.client import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Kind,
    Kube,
    KubeError,
    NotFound,
    Unreachable,
)
from elasticjob_operator.replica.leader import LeaseLost, hold_lease
from elasticjob_operator.replica.lease import LeaseSettings

Json = dict[str, Any]
Trouble = Callable[[str], Awaitable[None]]
DURATION = 8
RENEW = 2.0


class Clockwork(asyncio.SelectorEventLoop):
    """Event loop in which waiting takes no time: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        loop = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                assert timeout is not None, "everybody waits, and nobody for the clock"
                loop.now += max(timeout, 0.0)
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


async def no_trouble(verb: str) -> None:
    """Succeed without delay."""


class FakeKube:
    """Lease storage with a server's rules: each write makes a new version, a stale one is refused.

    `trouble` is awaited before a call has its effect, `after` after that: they raise, or stall.
    """

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.trouble: Trouble = no_trouble
        self.after: Trouble = no_trouble
        self.calls: list[str] = []
        self._versions = itertools.count(1)

    def client(self) -> Kube:
        return cast(Kube, self)

    @property
    def holder(self) -> str:
        """Name of the holder, without the suffix that makes its process unique."""
        spec = (self.lease or {}).get("spec", {})
        return str(spec.get("holderIdentity") or "").partition("_")[0]

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        await self._begin("get")
        if self.lease is None:
            raise NotFound("get", "no")
        return await self._end("get")

    async def create(self, kind: Kind, namespace: str, body: Json) -> Json:
        await self._begin("create")
        if self.lease is not None:
            raise AlreadyExists("create", "no")
        self._keep(body["spec"])
        return await self._end("create")

    async def patch(self, kind: Kind, namespace: str, name: str, body: Json) -> Json:
        await self._begin("patch")
        if self.lease is None:
            raise NotFound("patch", "no")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("patch", "the object has been modified")
        self._keep(self.lease["spec"] | body["spec"])
        return await self._end("patch")

    def held_by(self, holder: str, duration: int = DURATION) -> None:
        self._keep({"holderIdentity": holder, "leaseDurationSeconds": duration, "renewTime": "t"})

    def touch(self) -> None:
        """Write the Lease as an unrelated client."""
        assert self.lease is not None
        self._keep(self.lease["spec"])

    def _keep(self, spec: Json) -> None:
        spec = {key: value for key, value in spec.items() if value is not None}
        self.lease = {"metadata": {"resourceVersion": str(next(self._versions))}, "spec": spec}

    async def _begin(self, verb: str) -> None:
        self.calls.append(verb)
        await self.trouble(verb)

    async def _end(self, verb: str) -> Json:
        assert self.lease is not None
        answer = self.lease
        await self.after(verb)
        return answer


def failing(error: KubeError, *verbs: str, times: int = 1_000_000) -> Trouble:
    """Return a hook that raises the error for calls of these verbs, `times` times."""
    left = itertools.count(times, -1)

    async def trouble(verb: str) -> None:
        if verb in verbs and next(left) > 0:
            raise error

    return trouble


def settings(identity: str = "a") -> LeaseSettings:
    return LeaseSettings("system", "operator", identity, DURATION, RENEW)


def unused() -> None:
    raise AssertionError("the activity ended in time")


def run(scenario: Callable[[FakeKube], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(1000):
            await scenario(FakeKube())

    failures: list[Json] = []
    with asyncio.Runner(loop_factory=Clockwork) as runner:
        runner.get_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        runner.run(main())
    assert failures == []


def clock() -> float:
    return asyncio.get_running_loop().time()


async def for_ever() -> None:
    await asyncio.Event().wait()


async def hold(
    kube: FakeKube,
    body: Callable[[], Awaitable[None]] = for_ever,
    time: Callable[[], float] = clock,
    abort: Callable[[], None] = unused,
    identity: str = "a",
) -> None:
    """Run `body` while holding the Lease."""
    async with hold_lease(kube.client(), settings(identity), time, abort):
        await body()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.05)


def test_free_lease_is_acquired_at_once_and_released_at_the_end() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            assert kube.holder == "a"
        assert kube.holder == ""
        assert kube.calls == ["get", "create", "patch"]

    run(scenario)


def test_lease_is_renewed_while_the_body_runs() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            await until(lambda: kube.calls.count("patch") >= 12)  # longer than it lasts
            assert kube.calls.count("get") == 1, "nobody else wrote, so it need not be read"

    run(scenario)


def test_second_process_waits_for_release() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with AsyncExitStack() as first, asyncio.TaskGroup() as group:
            await first.enter_async_context(hold_lease(kube.client(), settings("a"), clock, unused))
            entered = asyncio.Event()

            async def enter() -> None:
                entered.set()
                await for_ever()

            second = group.create_task(hold(kube, enter, identity="b"))
            await until(lambda: kube.calls.count("patch") >= 12)
            assert not entered.is_set()
            begin = clock()
            await first.aclose()
            await entered.wait()
            assert clock() - begin <= RENEW, "nobody waits for it to run out"
            assert kube.holder == "b"
            second.cancel()

    run(scenario)


def test_expired_lease_is_taken_over() -> None:
    async def scenario(kube: FakeKube) -> None:
        kube.held_by("gone", duration=7)
        begin = clock()
        async with hold_lease(kube.client(), settings(), clock, unused):
            assert clock() - begin == 7
            assert kube.lease is not None
            assert kube.lease["spec"]["leaseTransitions"] == 1

    run(scenario)


def test_two_processes_of_one_name_are_distinguished() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with (
            hold_lease(kube.client(), settings("same"), clock, unused),
            asyncio.TaskGroup() as group,
        ):
            entered = asyncio.Event()

            async def enter() -> None:
                entered.set()
                await for_ever()

            second = group.create_task(hold(kube, enter, identity="same"))
            await until(lambda: kube.calls.count("patch") >= 12)
            assert not entered.is_set()
            second.cancel()

    run(scenario)


@pytest.mark.parametrize("error", [Unreachable("x", "no"), Forbidden("x", "no")])
@pytest.mark.parametrize("verb", ["get", "create"])
def test_waiting_replica_retries_after_errors(error: KubeError, verb: str) -> None:
    async def scenario(kube: FakeKube) -> None:
        kube.trouble = failing(error, verb, times=3)
        async with hold_lease(kube.client(), settings(), clock, unused):
            assert kube.holder == "a"
            assert kube.calls.count(verb) >= 4

    run(scenario)


def test_claim_with_lost_answer_is_recognised_as_own() -> None:
    async def scenario(kube: FakeKube) -> None:
        kube.after = failing(Unreachable("x", "lost"), "create", times=1)
        begin = clock()
        async with hold_lease(kube.client(), settings(), clock, unused):
            assert kube.calls == ["get", "create", "get", "patch"]
            assert clock() - begin == RENEW

    run(scenario)


def test_lost_race_for_a_free_lease_continues_waiting() -> None:
    async def scenario(kube: FakeKube) -> None:
        async def somebody_is_faster(verb: str) -> None:
            if verb == "create":
                kube.trouble = no_trouble
                kube.held_by("faster")

        kube.trouble = somebody_is_faster
        begin = clock()
        async with hold_lease(kube.client(), settings(), clock, unused):
            assert clock() - begin == DURATION

    run(scenario)


def test_renewal_that_conflicts_with_foreign_write_is_repeated() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            for _ in range(3):
                kube.touch()
                await asyncio.sleep(2 * RENEW)
            assert kube.holder == "a"

    run(scenario)


def test_deleted_lease_is_created_again() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            kube.lease = None
            await until(lambda: kube.holder == "a")

    run(scenario)


def test_renewals_may_fail_for_a_while() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            kube.trouble = failing(Unreachable("x", "no"), "get", "patch", times=4)
            await until(lambda: kube.calls.count("patch") >= 8)
            assert kube.holder == "a"

    run(scenario)


def test_lease_taken_by_another_ends_the_body_at_next_renewal() -> None:
    async def scenario(kube: FakeKube) -> None:
        async def body() -> None:
            kube.held_by("thief")
            await for_ever()

        begin = clock()
        with pytest.raises(LeaseLost, match="thief holds it"):
            await hold(kube, body)
        assert clock() - begin == RENEW
        assert kube.holder == "thief", "what is another's is not let go"

    run(scenario)


async def stall(verb: str) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "trouble", [failing(Unreachable("x", "no"), "get", "patch", "create"), stall]
)
def test_lease_that_cannot_be_renewed_ends_the_body_before_takeover(
    trouble: Trouble,
) -> None:
    async def scenario(kube: FakeKube) -> None:
        begin, ended_at = clock(), 0.0

        async def body() -> None:
            nonlocal ended_at
            kube.trouble = trouble
            try:
                await for_ever()
            finally:
                ended_at = clock()

        with pytest.raises(LeaseLost, match="could not be renewed in time"):
            await hold(kube, body)
        assert ended_at - begin == 0.75 * DURATION

    run(scenario)


def test_lease_time_counts_from_sending_of_last_confirmed_renewal() -> None:
    async def scenario(kube: FakeKube) -> None:
        async def slowly(verb: str) -> None:
            await asyncio.sleep(0.75 * RENEW)

        async def body() -> None:
            kube.trouble = stall
            await for_ever()

        kube.after = slowly
        begin = clock()
        with pytest.raises(LeaseLost):
            await hold(kube, body)
        # Created at once, as there was none to be read; the answer came later.
        assert clock() - begin == 0.75 * DURATION + RENEW, "letting go was tried for a while"

    run(scenario)


def test_process_suspended_for_too_long_ends_at_once() -> None:
    async def scenario(kube: FakeKube) -> None:
        aborted, jump = asyncio.Event(), 0.0

        def jumping() -> float:
            return clock() + jump

        async def body() -> None:
            nonlocal jump
            await until(lambda: kube.calls.count("patch") >= 2)
            jump = 100.0
            kube.held_by("next")
            await aborted.wait()

        with pytest.raises(LeaseLost):
            await hold(kube, body, jumping, aborted.set)
        assert aborted.is_set()
        assert kube.holder == "next"

    run(scenario)


def test_body_that_does_not_end_in_time_ends_the_process() -> None:
    async def scenario(kube: FakeKube) -> None:
        aborted = asyncio.Event()
        begin = clock()

        async def body() -> None:
            kube.trouble = failing(Unreachable("x", "no"), "get", "patch")
            try:
                await for_ever()
            except asyncio.CancelledError:
                await aborted.wait()
                assert clock() - begin == DURATION
                raise

        with pytest.raises(LeaseLost):
            await hold(kube, body, abort=aborted.set)

    run(scenario)


def test_lease_is_held_while_cancelled_body_cleans_up() -> None:
    async def scenario(kube: FakeKube) -> None:
        entered, tidied = asyncio.Event(), False

        async def body() -> None:
            nonlocal tidied
            entered.set()
            try:
                await for_ever()
            finally:
                await asyncio.sleep(3 * DURATION)
                tidied = kube.holder == "a"

        async with asyncio.TaskGroup() as group:
            holding = group.create_task(hold(kube, body))
            await entered.wait()
            holding.cancel()
        assert tidied
        assert holding.cancelled()
        assert kube.holder == ""

    run(scenario)


def test_body_exception_propagates_unchanged_and_lease_is_released() -> None:
    async def scenario(kube: FakeKube) -> None:
        async def body() -> None:
            try:
                raise ValueError("first")
            except ValueError as error:
                raise KeyError("why") from error

        with pytest.raises(KeyError, match="why") as found:
            await hold(kube, body)
        assert isinstance(found.value.__cause__, ValueError)
        assert kube.holder == ""

    run(scenario)


def test_body_exception_during_lease_loss_is_attached_as_cause() -> None:
    async def scenario(kube: FakeKube) -> None:
        async def body() -> None:
            kube.held_by("thief")
            try:
                await for_ever()
            finally:
                raise KeyError("why")

        with pytest.raises(LeaseLost) as found:
            await hold(kube, body)
        assert isinstance(found.value.__cause__, ExceptionGroup)
        assert found.value.__cause__.subgroup(KeyError)

    run(scenario)


def test_body_that_ends_during_a_renewal_releases_the_renewed_lease() -> None:
    async def scenario(kube: FakeKube) -> None:
        written = asyncio.Event()

        async def no_answer(verb: str) -> None:
            if verb == "patch" and not written.is_set():
                written.set()
                await stall(verb)

        async with hold_lease(kube.client(), settings(), clock, unused):
            kube.after = no_answer
            await written.wait()
        assert kube.holder == ""

    run(scenario)


def test_lease_that_cannot_be_released_expires() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused):
            kube.trouble = stall
        assert kube.holder == "a"

    run(scenario)


def test_lease_that_is_to_expire_is_not_released() -> None:
    async def scenario(kube: FakeKube) -> None:
        async with hold_lease(kube.client(), settings(), clock, unused) as lease:
            lease.let_expire()
        ended = clock()
        assert kube.holder == "a"
        async with hold_lease(kube.client(), settings("b"), clock, unused):
            assert clock() - ended >= DURATION

    run(scenario)


def test_at_most_one_of_many_processes_is_active() -> None:
    async def scenario(kube: FakeKube) -> None:
        active: list[str] = []
        terms = 0

        async def flaky(verb: str) -> None:
            calls = len(kube.calls)
            await asyncio.sleep(0.3 * (calls % 5))
            if calls % 7 == 0:
                raise Unreachable(verb, "no")

        async def replica(name: str) -> None:
            nonlocal terms
            for _ in range(4):
                try:
                    async with hold_lease(kube.client(), settings(name), clock, unused):
                        active.append(name)
                        try:
                            assert active == [name]
                            await asyncio.sleep(5.0)
                            terms += 1
                        finally:
                            active.remove(name)
                except LeaseLost:
                    continue

        kube.trouble = kube.after = flaky
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b", "c"):
                group.create_task(replica(name))
        assert terms >= 9

    run(scenario)
