"""Protocol on a real etcd: every transition, and the faults that only a real one shows."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.directives import Finish, Left, Refused
from elasticjob_rendezvous.protocol.kv import Put, Range
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer
from tests.integration.rendezvous_gang import FAST, Node, gang, settings, together, until


def test_three_members_form_round_in_natural_name_order(
    newest_etcd: EtcdServer, prefix: str
) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-10", "n-2", "n-1"]) as nodes:
            await until(lambda: together(nodes), "three run together")
            roster = nodes[0].running
            assert roster is not None
            assert [assignment.name for assignment in roster.seats] == ["n-1", "n-2", "n-10"]
            assert [assignment.base_rank for assignment in roster.seats] == [0, 1, 2]
            assert roster.master_port == nodes[2].local.master_port

    asyncio.run(main())


def test_newcomer_joins_and_leaver_leaves(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        url = newest_etcd.url
        async with gang(url, prefix, ["n-0", "n-1"]) as nodes:
            await until(lambda: together(nodes), "two run")
            bounds = replace(FAST, expected=2)
            async with Node(settings(url, prefix, "n-2", bounds)) as newcomer:
                everybody = [*nodes, newcomer]
                await until(lambda: together(everybody, 1), "three run")
                round_ = nodes[0].round
                assert round_ is not None
                assert (round_.number, round_.cause.kind) == (2, CauseKind.JOIN)
                nodes[1].report(leaving="drained")
                rest = [nodes[0], newcomer]
                await until(lambda: together(rest, 2), "two run again")
                round_ = nodes[0].round
                assert round_ is not None
                assert round_.cause.kind is CauseKind.LEAVE
                assert round_.cause.members == ("n-1",)
                assert round_.charged == ()
                assert isinstance(nodes[1].member.directive, Left)

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["coordinator", "successor", "third"])
def test_dead_agent_is_removed_within_fraction_of_lease(
    newest_etcd: EtcdServer, prefix: str, victim: int
) -> None:
    async def main() -> None:
        names = ["n-0", "n-1", "n-2"]
        bounds = replace(FAST, keep_alive_seconds=60.0)  # sufficient even for a machine under load
        async with gang(newest_etcd.url, prefix, names[:1], bounds) as first:
            await until(lambda: first[0].round is not None, "n-0 coordinates")
            async with gang(newest_etcd.url, prefix, names[1:], bounds) as others:
                nodes = [*first, *others]
                await until(lambda: together(nodes), "three run")
                before = nodes[0].round
                assert before is not None
                await until(
                    lambda: all(
                        node.member.linked for node in nodes if not node.member.coordinates
                    ),
                    "all are linked",
                )
                await nodes[victim].crash()
                rest = [node for node in nodes if node is not nodes[victim]]
                took = await until(lambda: together(rest, before.number), "the rest run")
                assert took < bounds.keep_alive_seconds / 2
                round_ = rest[0].round
                assert round_ is not None
                assert round_.cause.kind is CauseKind.LOSS
                assert round_.cause.members == (names[victim],)

    asyncio.run(main())


def test_drain_request_makes_member_leave(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"]) as nodes:
            await until(lambda: together(nodes), "two run")
            marked = replace(FAST, expected=1, marks=(DrainRequest("id-n-1", "scaled down"),))
            async with Client([newest_etcd.url]) as client:
                await client.put(Put(Keys(prefix.rstrip("/") + "/").bounds, encode(marked)))
            await until(lambda: together(nodes[:1], 1), "one runs")
            assert isinstance(nodes[1].member.directive, Left)
            round_ = nodes[0].round
            assert round_ is not None
            assert "scaled down" in round_.cause.detail

    asyncio.run(main())


def test_failures_are_charged_and_exhausted_budget_closes_job(
    newest_etcd: EtcdServer, prefix: str
) -> None:
    async def main() -> None:
        bounds = replace(FAST, max_restarts=1)
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"], bounds) as nodes:
            await until(lambda: together(nodes), "two run")
            nodes[1].fail(FailureClass.USER_ERROR)
            await until(lambda: together(nodes, 1), "they run again")
            roster = nodes[0].running
            assert roster is not None
            assert roster.restarts == 1
            nodes[0].fail(FailureClass.USER_ERROR)
            await until(
                lambda: all(isinstance(node.member.directive, Finish) for node in nodes),
                "the job is closed",
            )
            for node in nodes:
                finish = node.member.directive
                assert isinstance(finish, Finish)
                assert finish.outcome.kind is OutcomeKind.FAILED
                await until(
                    lambda node=node: getattr(node.member.directive, "failure", None),  # type: ignore[misc]
                    "the culprit is known",
                )
                culprit = node.member.directive
                assert isinstance(culprit, Finish)
                assert culprit.failure is not None
                assert culprit.failure.name == "n-0"

    asyncio.run(main())


def test_aborted_peers_of_lost_node_are_not_charged(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1", "n-2"]) as nodes:
            await until(lambda: together(nodes), "three run")
            await nodes[2].crash()
            nodes[0].fail(FailureClass.PEER_ABORT)
            nodes[1].fail(FailureClass.PEER_ABORT)
            await until(lambda: together(nodes[:2], 1), "two run")
            await until(
                lambda: nodes[0].round is not None and not nodes[0].round.pending, "the verdict"
            )
            round_ = nodes[0].round
            assert round_ is not None
            assert round_.charged == ()

    asyncio.run(main())


def test_abort_without_loss_is_charged_after_window(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        bounds = replace(FAST, keep_alive_seconds=8.0)
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"], bounds) as nodes:
            await until(lambda: together(nodes), "two run")
            began = asyncio.get_running_loop().time()
            nodes[0].fail(FailureClass.PEER_ABORT)
            await until(lambda: together(nodes, 1), "they run again")
            round_ = nodes[0].round
            assert round_ is not None
            assert (round_.charged, round_.pending) == ((), (1,)), "at once, before the verdict"
            await until(
                lambda: nodes[0].round is not None and nodes[0].round.charged == (1,), "the charge"
            )
            assert asyncio.get_running_loop().time() - began > bounds.keep_alive_seconds
            assert together(nodes, 1), "the charge itself stops nobody"

    asyncio.run(main())


def test_job_succeeds_when_whole_roster_is_done(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"]) as nodes:
            await until(lambda: together(nodes), "two run")
            nodes[0].report(done=True, workers=Workers.NONE)
            await until(
                lambda: any("id-n-0" in node.member.view.dones.get(1, {}) for node in nodes),
                "the first is done",
            )
            assert nodes[0].round is not None
            assert nodes[0].round.state is RoundState.FINAL
            nodes[1].report(done=True, workers=Workers.NONE)
            await until(
                lambda: all(isinstance(node.member.directive, Finish) for node in nodes), "closed"
            )
            finish = nodes[0].member.directive
            assert isinstance(finish, Finish)
            assert finish.outcome.kind is OutcomeKind.SUCCEEDED

    asyncio.run(main())


def test_different_sizes_are_refused_with_both_values(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0"]) as nodes:
            await until(lambda: together(nodes), "one runs")
            other = replace(FAST, max_nodes=7)
            async with Node(settings(newest_etcd.url, prefix, "n-1", other)) as stranger:
                await until(lambda: isinstance(stranger.member.directive, Refused), "refused")
                refused = stranger.member.directive
                assert isinstance(refused, Refused)
                assert "max_nodes=7" in refused.reason
                assert "4" in refused.reason
            assert together(nodes)

    asyncio.run(main())


def test_closing_ends_all_and_later_member_finds_job_closed(
    newest_etcd: EtcdServer, prefix: str
) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"]) as nodes:
            await until(lambda: together(nodes), "two run")
            nodes[1].member.close(Outcome(OutcomeKind.STOPPED, "enough"))
            await until(
                lambda: all(isinstance(node.member.directive, Finish) for node in nodes), "closed"
            )
        async with Node(settings(newest_etcd.url, prefix, "n-2")) as late:
            await until(lambda: isinstance(late.member.directive, Finish), "told so")
        async with Client([newest_etcd.url]) as client:
            folder = Range(Keys(prefix.rstrip("/") + "/").members, prefix=True)
            began = asyncio.get_running_loop().time()
            while (await client.range(folder)).kvs:
                assert asyncio.get_running_loop().time() - began < 60.0, "keys are left over"
                await asyncio.sleep(0.1)

    asyncio.run(main())


# -- faults of etcd -------------------------------------------------------------------


async def outlive(server: EtcdServer, nodes: list[Node], lease_seconds: float) -> None:
    """Take etcd away for two leases: no node stops then, nor when it is back."""
    server.kill()
    await asyncio.sleep(2 * lease_seconds)  # the outage itself
    assert together(nodes), "nobody stopped during the outage"
    await asyncio.to_thread(server.start)
    await asyncio.sleep(lease_seconds)  # time for a wrong loss to show
    assert together(nodes), "nobody stopped after the outage"


def test_training_survives_etcd_outage_and_membership_changes_afterwards(
    start_etcd: StartEtcd, prefix: str
) -> None:
    server = start_etcd()

    async def main() -> None:
        async with gang(server.url, prefix, ["n-0", "n-1", "n-2"]) as nodes:
            await until(lambda: together(nodes), "three run")
            await outlive(server, nodes, FAST.keep_alive_seconds)
            assert {tuple(node.started) for node in nodes} == {(1,)}
            nodes[1].report(leaving="drained")
            await until(lambda: together([nodes[0], nodes[2]], 1), "the round goes on")

    asyncio.run(main())


def test_node_without_peers_survives_etcd_outage(start_etcd: StartEtcd, prefix: str) -> None:
    """The refusal of etcd has to be known before the lease has expired, as there are no links."""
    server = start_etcd()

    async def main() -> None:
        bounds = replace(FAST, keep_alive_seconds=4.0)
        async with gang(server.url, prefix, ["n-0"], bounds) as nodes:
            await until(lambda: together(nodes), "it runs")
            await outlive(server, nodes, bounds.keep_alive_seconds)
            assert nodes[0].started == [1]

    asyncio.run(main())


def test_gang_survives_loss_of_all_etcd_data(start_etcd: StartEtcd, prefix: str) -> None:
    server = start_etcd()

    async def main() -> None:
        async with gang(server.url, prefix, ["n-0", "n-1", "n-2"]) as nodes:
            await until(lambda: together(nodes), "three run")
            server.kill()
            await asyncio.to_thread(server.wipe)
            await asyncio.to_thread(server.start)
            await until(
                lambda: any(
                    node.member.coordinates
                    and node.member.view.round is not None
                    and len(node.member.view.members()) == 3
                    for node in nodes
                ),
                "all are registered again",
            )
            await asyncio.sleep(FAST.keep_alive_seconds)  # time for a wrong loss to show
            assert together(nodes)
            assert {tuple(node.started) for node in nodes} == {(1,)}
            nodes[2].report(leaving="drained")
            await until(lambda: together(nodes[:2], 1), "the next number is higher")

    asyncio.run(main())


def test_revoked_lease_is_replaced_without_stop(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1", "n-2"]) as nodes:
            await until(lambda: together(nodes), "three run")
            victim = next(node for node in nodes if not node.member.coordinates)
            await until(lambda: victim.member.linked, "the link stands")
            key = victim.member.view.member(victim.settings.config.identity.id)
            assert key is not None
            async with Client([newest_etcd.url]) as client:
                await client.revoke(key.record.lease)
                began = asyncio.get_running_loop().time()
                while True:
                    kvs = (await client.range(Range(key.key.rsplit("/", 1)[0], True))).kvs
                    if kvs and kvs[0].key != key.key:
                        break
                    assert asyncio.get_running_loop().time() - began < 60.0, "not registered again"
                    await asyncio.sleep(0.05)
            await asyncio.sleep(FAST.keep_alive_seconds)  # time for a wrong loss to show
            assert together(nodes)
            assert {tuple(node.started) for node in nodes} == {(1,)}

    asyncio.run(main())


def test_compaction_during_watches_loses_nothing(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with gang(newest_etcd.url, prefix, ["n-0", "n-1"]) as nodes:
            await until(lambda: together(nodes), "two run")
            async with Client([newest_etcd.url]) as client:
                revision = (await client.range(Range(prefix))).revision
            await asyncio.to_thread(newest_etcd.ctl, "compact", str(revision))
            nodes[0].report(leaving="drained")
            await until(lambda: together(nodes[1:], 1), "one runs")

    asyncio.run(main())


def test_absent_etcd_is_refused_after_timeout(prefix: str) -> None:
    async def main() -> None:
        given = settings("http://127.0.0.1:1", prefix, "n-0")
        given = replace(given, config=replace(given.config, connect_seconds=1.0))
        async with Node(given) as node:
            await until(lambda: isinstance(node.member.directive, Refused), "refused")
            refused = node.member.directive
            assert isinstance(refused, Refused)
            assert "127.0.0.1:1" in refused.reason

    asyncio.run(main())


# -- cost -----------------------------------------------------------------------------


def _requests(server: EtcdServer) -> float:
    """Return the number of gRPC messages received by etcd so far, streams and unary."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("grpc_server_msg_received_total")
    )


@pytest.mark.parametrize("size", [16, 48])
def test_round_needs_at_most_eight_requests_per_member(
    start_etcd: StartEtcd, prefix: str, size: int
) -> None:
    server = start_etcd()

    async def main() -> None:
        bounds = replace(FAST, max_nodes=size, keep_alive_seconds=10.0)
        before = _requests(server)
        names = [f"n-{index}" for index in range(size)]
        async with gang(server.url, prefix, names, bounds) as nodes:
            await until(lambda: together(nodes), "all run")
            await until(
                lambda: any(
                    (history := node.member.view.histories.get(1)) is not None
                    and history.record.start_ms is not None
                    for node in nodes
                ),
                "the start is recorded",
            )
            assert (_requests(server) - before) / size <= 8.0

    asyncio.run(main())
