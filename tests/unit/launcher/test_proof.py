"""Proofs that a peer holds the job's key."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_launcher import proof
from elasticjob_launcher.proof import BadPeer, Exchange, Message, Peer, Refusal, Role

KEY = b"the job's key"
N, M = "0a" * 16, "1b" * 16
B, A = Peer("id-b", "s2"), Peer("id-a", "s1")
EXCHANGE = Exchange(B, N, A, M)
FACTS: Message = {"at": "10.0.0.1 7", "agent_attached": True, "workers": 2, "round": 7}
MAC = "c" * 64
ASKS = (proof.LINK, proof.PROBE_LAUNCHER)


def link_question(**changes: Any) -> Message:
    return {**proof.link_question(KEY, EXCHANGE), **changes}


def probe_question(**changes: Any) -> Message:
    return {**proof.probe_question(KEY, EXCHANGE, proof.PROBE_LAUNCHER, 7, True), **changes}


def link_answer(**changes: Any) -> Message:
    return {**proof.link_answer(KEY, EXCHANGE, MAC), **changes}


def probe_answer(**changes: Any) -> Message:
    return {**proof.probe_answer(KEY, EXCHANGE, FACTS, MAC), **changes}


def permission(**changes: Any) -> Message:
    return {**proof.permission(KEY, EXCHANGE, 7, 2.5, MAC), **changes}


Read = Callable[[Message], object]
READERS: dict[str, tuple[Callable[..., Message], Read]] = {
    "link question": (link_question, lambda said: proof.read_question(KEY, said, M, ASKS)),
    "probe question": (probe_question, lambda said: proof.read_question(KEY, said, M, ASKS)),
    "link answer": (link_answer, lambda said: proof.read_link_answer(KEY, EXCHANGE, said, MAC)),
    "probe answer": (probe_answer, lambda said: proof.read_probe_answer(KEY, EXCHANGE, said, MAC)),
    "permission": (permission, lambda said: proof.read_permission(KEY, EXCHANGE, said, MAC)),
}
each_message = pytest.mark.parametrize("kind", READERS)


def refusal(read: Read, message: Message) -> Refusal:
    with pytest.raises(BadPeer) as refused:
        read(message)
    assert str(refused.value).startswith(f"{refused.value.reason.value}: ")
    return refused.value.reason


def test_questions_and_answers_are_read() -> None:
    question = proof.read_question(KEY, link_question(), M, ASKS)
    assert question[:6] == ("link", B, A, N, 0, False)
    question = proof.read_question(KEY, probe_question(), M, ASKS)
    assert question[:6] == ("probe launcher", B, A, N, 7, True)
    assert proof.answering(question, A, M) == EXCHANGE
    assert proof.read_link_answer(KEY, EXCHANGE, link_answer(), MAC)[0] == EXCHANGE
    _, answer = proof.read_probe_answer(KEY, EXCHANGE, probe_answer(), MAC)
    assert answer[:6] == (A, "10.0.0.1 7", True, 2, 7, None)
    assert proof.read_permission(KEY, EXCHANGE, permission(), MAC) == (7, 2.5)
    assert proof.read_challenge(proof.challenge(M)) == M


def test_answer_of_another_member_names_it() -> None:
    other = EXCHANGE._replace(answerer=Peer("id-z", "s9"))
    answer = proof.link_answer(KEY, other, MAC)
    assert proof.read_link_answer(KEY, EXCHANGE, answer, MAC)[0] == other


def test_no_two_roles_share_a_code() -> None:
    """The oracle: a code obtained from one message is useless in every other."""
    codes = {role: proof.digest(KEY, role, EXCHANGE, b"{}", "") for role in Role}
    assert len(set(codes.values())) == len(Role)


@given(st.lists(st.text(max_size=6), min_size=8, max_size=8), st.data())
def test_no_two_exchanges_share_a_code(texts: list[str], data: st.DataObject) -> None:
    """The fields are length-prefixed: no characters can move from one to the next."""

    def code(fields: list[str]) -> bytes:
        asker, answerer = Peer(fields[0], fields[1]), Peer(fields[3], fields[4])
        exchange = Exchange(asker, fields[2], answerer, fields[5])
        body = fields[6].encode("utf-8", "surrogatepass")
        previous = fields[7].encode("ascii", "replace").decode()
        return proof.digest(KEY, Role.LINK_QUESTION, exchange, body, previous)

    at = data.draw(st.integers(0, 5))
    moved = list(texts)
    moved[at], moved[at + 1] = texts[at] + texts[at + 1][:1], texts[at + 1][1:]
    assert (code(moved) == code(texts)) is (moved == texts)


@pytest.mark.parametrize(
    "change",
    [
        {"asker": Peer("id-z", "s2")},
        {"asker": Peer("id-b", "s9")},
        {"asker_nonce": "2c" * 16},
        {"answerer_nonce": "2c" * 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_answer_to_another_question_is_refused(change: dict[str, Any]) -> None:
    """Replay and relay: the code covers both nonces and the asker's identity."""
    other = EXCHANGE._replace(**change)
    link, probe = link_answer(), probe_answer()
    for exchange, mac in ((other, MAC), (EXCHANGE, "d" * 64)):
        with pytest.raises(BadPeer, match="WrongProof"):
            proof.read_link_answer(KEY, exchange, link, mac)
        with pytest.raises(BadPeer, match="WrongProof"):
            proof.read_probe_answer(KEY, exchange, probe, mac)


def test_question_to_a_launcher_is_refused_by_an_agent() -> None:
    """An agent's answer proves less: nobody may obtain it in place of the launcher's."""
    for said in (probe_question(), probe_question(ask=proof.PROBE_AGENT)):
        with pytest.raises(BadPeer):
            proof.read_question(KEY, said, M, (proof.LINK, proof.PROBE_AGENT))


@pytest.mark.parametrize("ask", ["link", "probe"])
def test_replayed_question_is_refused(ask: str) -> None:
    question = link_question() if ask == "link" else probe_question()
    assert refusal(lambda said: proof.read_question(KEY, said, "2c" * 16, ASKS), question) is (
        Refusal.WRONG_PROOF
    )


def test_message_is_useless_in_every_other_role() -> None:
    """The launcher's answer as a link's proof and the reverse, with the fields of the other."""
    for (kind, (make, _)), (other, (like, read)) in itertools.product(READERS.items(), repeat=2):
        if kind != other:
            forged = like(mac=make()["mac"])
            assert refusal(read, forged) is Refusal.WRONG_PROOF, (kind, other)
            if not (kind.endswith("question") and other.endswith("question")):
                with pytest.raises(BadPeer):
                    read(make())


@each_message
@pytest.mark.parametrize("key", [b"another job's key", b""])
def test_another_key_is_refused(kind: str, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    make, read = READERS[kind]
    message = make()
    monkeypatch.setitem(globals(), "KEY", key)
    assert refusal(read, message) is Refusal.WRONG_PROOF


def test_empty_key_signs_nothing() -> None:
    with pytest.raises(ValueError, match="requires a job key"):
        proof.link_question(b"", EXCHANGE)


@each_message
def test_unknown_and_missing_fields_are_refused(kind: str) -> None:
    make, read = READERS[kind]
    read(make())
    assert refusal(read, make(extra=1)) is Refusal.UNKNOWN_FIELD
    for name in make():
        if (kind, name) == ("probe answer", "round"):  # null while no workers run
            continue
        message = make()
        del message[name]
        assert refusal(read, message) is Refusal.MALFORMED, name


@each_message
def test_signed_unknown_field_is_refused(kind: str) -> None:
    """Also from a peer that holds the key: nothing is accepted and ignored."""
    roles = {
        "link question": (Role.LINK_QUESTION, ""),
        "probe question": (Role.PROBE_QUESTION, ""),
        "link answer": (Role.LINK_ANSWER, MAC),
        "probe answer": (Role.PROBE_ANSWER, MAC),
        "permission": (Role.PROBE_PERMISSION, MAC),
    }
    make, read = READERS[kind]
    body = {**make(), "link": {}}
    del body["mac"]
    role, previous = roles[kind]
    signed = proof.signed(KEY, role, EXCHANGE, body, previous)
    assert refusal(read, signed) is Refusal.UNKNOWN_FIELD


@each_message
def test_changed_field_is_refused(kind: str) -> None:
    make, read = READERS[kind]
    changes: dict[str, Any] = {
        "nonce": "3d" * 16, "from": ["id-z", "s2"], "to": ["id-z", "s1"], "round": 8,
        "extends": False, "member": "id-z", "session": "s9", "at": "10.0.0.2 7", "workers": 0,
        "agent_attached": False, "live_seconds": 3.0, "mac": "e" * 64,
    }  # fmt: skip
    for name in make():
        if name != "ask":
            assert refusal(read, make(**{name: changes[name]})) is Refusal.WRONG_PROOF, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ask", "LINK"), ("ask", None), ("ask", ["link"]), ("nonce", "0a"), ("nonce", 7),
        ("nonce", "0A" * 16), ("nonce", N + "\n"), ("nonce", "\u0660" * 32), ("from", "id-b"),
        ("from", ["id-b"]), ("from", ["id-b", None]), ("from", ["x" * 257, ""]), ("to", {}),
        ("round", True), ("round", -1), ("round", 2**64), ("round", "7"), ("round", 7.0),
        ("extends", 1), ("mac", None), ("mac", ""), ("mac", "C" * 64), ("mac", "\u00e9" * 64),
    ],
)  # fmt: skip
def test_malformed_question_is_refused(name: str, value: Any) -> None:
    _, read = READERS["probe question"]
    assert refusal(read, probe_question(**{name: value})) is Refusal.MALFORMED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("member", None), ("session", 7), ("at", None), ("at", "x" * 97), ("agent_attached", 1),
        ("workers", "2"), ("workers", True), ("workers", -1), ("round", "7"), ("round", -1),
        ("live_seconds", -0.1), ("live_seconds", True), ("live_seconds", float("nan")),
        ("live_seconds", 1e9), ("mac", "c"),
    ],
)  # fmt: skip
def test_malformed_answer_is_refused(name: str, value: Any) -> None:
    _, read = READERS["probe answer"]
    assert refusal(read, probe_answer(**{name: value})) is Refusal.MALFORMED


def test_half_characters_are_refused_without_an_exception() -> None:
    _, read = READERS["probe question"]
    assert refusal(read, probe_question(**{"from": ["\ud800", ""]})) is Refusal.WRONG_PROOF


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (("10.0.0.1", 7), "10.0.0.1 7"),
        (("::ffff:10.0.0.1", 7, 0, 0), "10.0.0.1 7"),
        (("fe80::1%eth0", 7, 0, 2), "fe80::1 7"),
    ],
)
def test_address_is_the_same_from_both_sides(name: tuple[Any, ...], address: str) -> None:
    assert proof.reached_address(name) == address


def test_code_of_a_known_message_does_not_change() -> None:
    """Every agent, launcher and operator of one release computes the same code."""
    code = proof.digest(KEY, Role.LINK_QUESTION, EXCHANGE, b'{"ask":"link"}', "")
    assert code.hex() == "d688bd7080e804a32ff832105d6cc7f1d283e857622e8d348002971bc372ab75"
