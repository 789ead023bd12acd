"""Status served by agents without etcd v3: form, signature, merge into one set of records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticjob_operator.domain.observed.etcd_records import (
    decode_records,
    merge_reports,
    rendezvous_view,
)
from elasticjob_rendezvous.protocol.records.agent_reports import (
    FRESH_SECONDS,
    AgentReport,
    ReportRequest,
    agent_report,
    answer_headers,
    check_answer,
    headers,
    merged,
    proven,
    read,
    setting_up,
    written,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.records.timings import History

PREFIX = "/elasticjob/default/uid/1/"
KEYS = Keys(PREFIX)
KEY = b"the job's key"


def assignment(member: str, rank: int, known: bool = True) -> RankAssignment:
    who = (member, f"job-{rank}") if known else ("", f"node {rank}")
    return RankAssignment(*who, "10.0.0.1", 1, "default", rank, rank, rank, 2)


def answer(member: str, *others: tuple[str, object], **options: str) -> AgentReport:
    found: dict[str, object] = {
        KEYS.session(member, "s"): Member(member, "s", f"job-{member}", "10.0.0.1", 0)
    }
    return agent_report(PREFIX, "c10d", member, {**found, **dict(others)}, **options)


def final(number: int, cause: CauseKind = CauseKind.START, **facts: object) -> tuple[str, Round]:
    found = Round(number, RoundState.FINAL, Cause(cause), nodes=2, world_size=2)
    return KEYS.round, replace(found, **facts)  # type: ignore[arg-type]


def together(*answers: AgentReport, present: tuple[str, ...] | None = None):
    return decode_records(PREFIX, merged(PREFIX, answers, present))


def test_agent_report_survives_a_round_trip():
    told = answer("a", final(3), state="final")
    assert read(json.dumps(written(told)).encode()) == replace(
        told, records={key: json.dumps(json.loads(v)).encode() for key, v in told.records.items()}
    )


@pytest.mark.parametrize("body", [b"", b"[]", b'{"backend": "c10d"}', b'{"records": [{}]}', b"1"])
def test_malformed_agent_report_is_named(body: bytes):
    with pytest.raises(MalformedRecord):
        read(body)


class TestProof:
    NOW = 10_000_000
    REQUEST = ReportRequest("a", "0a" * 16, NOW)
    BODY = b'{"member": "a"}'

    def given(self, request: ReportRequest = REQUEST, **changed: str) -> dict[str, str]:
        pairs = {name.lower(): value for name, value in headers(KEY, request).items()}
        return {**pairs, **{f"x-elasticjob-{name}": value for name, value in changed.items()}}

    def answered(self, request: ReportRequest = REQUEST, key: bytes = KEY) -> dict[str, str]:
        return {
            name.lower(): value for name, value in answer_headers(key, request, self.BODY).items()
        }

    def test_holder_of_the_key_may_read(self):
        assert proven(KEY, self.given(), "a", self.NOW + 500) == self.REQUEST
        check_answer(KEY, self.REQUEST, self.answered(), self.BODY)

    def test_proof_format(self):
        assert set(headers(b"k", self.REQUEST)) == {
            "X-ElasticJob-Time",
            "X-ElasticJob-Nonce",
            "X-ElasticJob-Proof",
        }
        assert set(answer_headers(b"k", self.REQUEST, b"")) == {"X-ElasticJob-Proof"}

    def test_job_without_a_key_is_open(self):
        assert proven(b"", {}, "a", 5)
        assert headers(b"", self.REQUEST) == answer_headers(b"", self.REQUEST, b"") == {}
        check_answer(b"", self.REQUEST, {}, self.BODY)

    def test_invalid_proof_is_refused(self):
        late = replace(self.REQUEST, at_ms=self.NOW - FRESH_SECONDS * 1000 - 1)
        own = self.answered()["x-elasticjob-proof"]
        for given in (
            {},
            self.given(late),
            self.given(replace(self.REQUEST, nonce="short")),
            self.given(proof="\u00e9" * 64),
            self.given(proof=own),
            self.given(time="soon"),
            self.given(time=str(self.NOW + 1)),
            self.given(nonce="1b" * 16),
        ):
            assert proven(KEY, given, "a", self.NOW) is None, given
        assert proven(b"another", self.given(), "a", self.NOW) is None

    def test_request_replayed_to_another_agent_is_refused(self):
        assert proven(KEY, self.given(), "b", self.NOW) is None

    def test_answer_without_valid_proof_is_refused(self):
        question = self.given()["x-elasticjob-proof"]
        for given in (
            {},
            {"x-elasticjob-proof": question},
            {"x-elasticjob-proof": "\u00e9" * 64},
            self.answered(key=b"another"),
            self.answered(replace(self.REQUEST, nonce="1b" * 16)),
            self.answered(replace(self.REQUEST, member="b")),
        ):
            with pytest.raises(MalformedRecord, match="no proof"):
                check_answer(KEY, self.REQUEST, given, self.BODY)
        with pytest.raises(MalformedRecord, match="no proof"):
            check_answer(KEY, self.REQUEST, self.answered(), b'{"member": "b"}')


class TestMerged:
    def test_newest_round_wins(self):
        found = together(answer("a", final(4)), answer("b", final(5)), answer("c", final(2)))
        assert found.round is not None
        assert found.round.number == 5
        assert [member.id for member in found.members] == ["a", "b", "c"]

    def test_own_record_of_an_agent_takes_precedence(self):
        other = Member("a", "s", "job-a", "10.0.0.1", 0, state=MemberState.RUNNING)
        told = answer("b", (KEYS.session("a", "s"), other))
        for answers in ((told, answer("a")), (answer("a"), told)):
            found = together(*answers)
            assert {m.id: m.state for m in found.members}["a"] is MemberState.WAITING

    def test_gone_agent_is_no_member_but_its_observations_stay(self):
        failure = Failure(3, "a", "job-a", 0, 0, FailureClass.USER_ERROR, 1, 1)
        gone = answer("a", final(3), (KEYS.failure(3, "a"), failure))
        found = together(gone, answer("b", final(2)), present=("b",))
        assert [member.id for member in found.members] == ["b"]
        assert found.failures == (failure,)
        assert found.round is not None
        assert found.round.number == 3

    def test_rank_assignments_are_merged(self):
        def told(member: str, rank: int) -> AgentReport:
            seats = tuple(assignment(m, r, m == member) for r, m in enumerate("ab"))
            return answer(
                member, final(3), (KEYS.roster(3), Roster(3, 2, "10.0.0.1", 29400, seats))
            )

        found = together(told("b", 1), told("a", 0))
        assert [(s.id, s.name) for s in found.rosters[3].seats] == [("a", "job-0"), ("b", "job-1")]
        assert found.round is not None
        assert found.round.master_name == "job-0"

    def test_history_with_a_cause_takes_precedence(self):
        one = History(3, Cause(CauseKind.START), 2, final_ms=10)
        other = History(3, Cause(CauseKind.FAILURE, ("job-b",)), 2, final_ms=12, start_ms=4)
        found = together(
            answer("a", final(3), (KEYS.history(3), one)),
            answer("b", final(3, CauseKind.FAILURE), (KEYS.history(3), other)),
        )
        assert found.histories[3] == other
        assert found.round is not None
        assert found.round.cause.kind is CauseKind.FAILURE

    def test_cold_starts_of_all_agents_are_merged(self):
        def told(member: str, cold: int | None, reason: str = "") -> AgentReport:
            history = History(
                3, Cause(CauseKind.START), 3, start_ms=9, cold_nodes=cold, cold_reason=reason
            )
            return answer(member, final(3), (KEYS.history(3), history))

        found = together(told("a", 0), told("b", 1, "a shell"), told("c", None)).histories[3]
        assert (found.cold_nodes, found.cold_reason) == (1, "a shell")
        assert together(told("a", None), told("b", None)).histories[3].cold_nodes is None

    @pytest.mark.parametrize("order", ["abc", "cba", "bca"])
    @pytest.mark.parametrize(("of_b", "first_step"), [(1500, 1400), (None, None)])
    def test_first_step_of_slowest_node_is_used(
        self, order: str, of_b: int | None, first_step: int | None
    ):
        took = {"a": (300, 900), "b": (200, of_b), "c": (100, 400)}

        def told(member: str) -> AgentReport:
            start, first = took[member]
            history = History(3, Cause(CauseKind.START), 3, start_ms=start, first_step_ms=first)
            return answer(member, final(3), (KEYS.history(3), history))

        found = together(*(told(member) for member in order)).histories[3]
        assert (found.start_ms, found.first_step_ms) == (300, first_step)

    def test_failure_is_the_outcome_whatever_other_agents_saw(self):
        def closed(number: int, kind: OutcomeKind) -> tuple[str, Round]:
            return final(number, state=RoundState.CLOSED, outcome=Outcome(kind, str(kind)))

        for order in ("ab", "ba"):
            ends = {
                order[0]: closed(3, OutcomeKind.FAILED),
                order[1]: closed(4, OutcomeKind.STOPPED),
            }
            found = together(*(answer(member, end) for member, end in ends.items()))
            assert found.round is not None
            assert found.round.outcome == Outcome(OutcomeKind.FAILED, "failed")

    def test_single_closed_report_does_not_end_a_newer_round(self):
        end = final(3, state=RoundState.CLOSED, outcome=Outcome(OutcomeKind.SUCCEEDED))
        found = together(answer("a", end), answer("b", final(4)))
        assert found.round is not None
        assert found.round.state is RoundState.FINAL

    def test_malformed_report_of_one_agent_does_not_hide_others(self):
        bad = AgentReport("c10d", "z", {"state/round": b'{"number": "x"}', "roster/3": b"[]"})
        found = together(answer("a", final(3)), bad)
        assert found.round is not None
        assert found.round.number == 3
        assert found.malformed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), False),
        (("",), False),
        (("setup", ""), True),
        (("setup", "setup"), True),
        (("setup", "joinable"), False),
    ],
)
def test_rendezvous_is_setting_up_until_an_agent_reached_it(
    words: tuple[str, ...], expected: bool
) -> None:
    answers = [answer(str(at), state=word) for at, word in enumerate(words)]
    assert setting_up(answers) is expected


@pytest.mark.parametrize(
    ("state", "word", "shown"),
    [
        (RoundState.JOINABLE, "setup", "setup"),
        (RoundState.JOINABLE, "joinable", "joinable"),
        (RoundState.FINAL, "setup", "final"),
    ],
)
def test_shown_rendezvous_state(state: RoundState, word: str, shown: str) -> None:
    said = answer("a", (KEYS.round, Round(1, state, Cause(CauseKind.START))), state=word)
    assert rendezvous_view(merge_reports(PREFIX, [said], ["a"])).state == shown
