"""Due changes of etcd's certificates, and their execution."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from elasticjob_operator.etcd_tls import certificates, certs_command
from elasticjob_operator.etcd_tls.certificate_rotation import (
    AUTHORITY_LIFE,
    BACKDATED,
    LEAF_LIFE,
    TRUST_TIME,
    Certificate,
    CertificateState,
    Wanted,
    Work,
    due_changes,
)
from elasticjob_operator.etcd_tls.certificates import (
    BUNDLE,
    CERT,
    FOLLOWING_KEY,
    KEY,
    PASSWORD,
    SIGNING_KEY,
    USER,
    Data,
    apply_changes,
    parse_data,
)
from elasticjob_operator.etcd_tls.certs_command import Exit, ForeignSecret
from elasticjob_operator.kubernetes.client import AlreadyExists, Conflict, Forbidden, Unreachable

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = frozenset({"etcd.ns.svc", "*.etcd.ns.svc", "127.0.0.1"})
WANTED = Wanted(NAMES)


def certificate(key: str, issuer: str, made: datetime, life: timedelta) -> Certificate:
    names = NAMES if key == "leaf" else frozenset()
    return Certificate(key, issuer, made - BACKDATED, made + life, names)


def ca(key: str, made: datetime = NOW) -> Certificate:
    return certificate(key, key, made, AUTHORITY_LIFE)


def leaf(issuer: str, made: datetime = NOW) -> Certificate:
    return certificate("leaf", issuer, made, LEAF_LIFE)


OLD = NOW - AUTHORITY_LIFE * 0.7
EXPIRED = NOW - AUTHORITY_LIFE - DAY
GOOD = CertificateState((ca("a"),), "a", None, leaf("a"), True)
GROWN_OLD = replace(GOOD, bundle=(ca("a", OLD),))
HOUR = timedelta(hours=1)


def announced(ago: timedelta) -> CertificateState:
    return replace(GROWN_OLD, bundle=(ca("a", OLD), ca("b", NOW - ago)), following="b")


CASES = {
    "nothing": (CertificateState(), [Work.MAKE_AUTHORITY, Work.SIGN, Work.MAKE_PASSWORD]),
    "all good": (GOOD, []),
    "no password": (replace(GOOD, password=False), [Work.MAKE_PASSWORD]),
    "no leaf": (replace(GOOD, leaf=None), [Work.SIGN]),
    "leaf of a stranger": (replace(GOOD, leaf=leaf("x")), [Work.SIGN]),
    "leaf with two thirds left": (replace(GOOD, leaf=leaf("a", NOW - LEAF_LIFE * 0.6)), []),
    "leaf with a third left": (replace(GOOD, leaf=leaf("a", NOW - LEAF_LIFE * 0.7)), [Work.SIGN]),
    "expired leaf": (replace(GOOD, leaf=leaf("a", NOW - LEAF_LIFE - DAY)), [Work.SIGN]),
    "a client's certificate is absent": (replace(GOOD, clients=(leaf("a"), None)), [Work.SIGN]),
    "a client's certificate of a stranger": (replace(GOOD, clients=(leaf("x"),)), [Work.SIGN]),
    "good certificates of clients": (replace(GOOD, clients=(leaf("a"),)), []),
    "another name": (
        replace(GOOD, leaf=replace(leaf("a"), names=NAMES - {"etcd.ns.svc"})),
        [Work.SIGN],
    ),
    "more names than wanted": (replace(GOOD, leaf=replace(leaf("a"), names=NAMES | {"x"})), []),
    "the authority's key is lost": (
        replace(GOOD, signing=None),
        [Work.MAKE_AUTHORITY, Work.SIGN],
    ),
    "the key is another's": (replace(GOOD, signing="x"), [Work.MAKE_AUTHORITY, Work.SIGN]),
    "an old authority": (GROWN_OLD, [Work.ANNOUNCE_AUTHORITY]),
    "announced just now": (announced(timedelta()), []),
    "announced 23 hours ago": (announced(TRUST_TIME - HOUR), []),
    "announced 25 hours ago": (
        announced(TRUST_TIME + HOUR),
        [Work.PROMOTE_AUTHORITY, Work.SIGN],
    ),
    "the old one expires while the next is being learnt": (
        replace(announced(HOUR), bundle=(ca("a", EXPIRED), ca("b", NOW - HOUR))),
        [Work.PROMOTE_AUTHORITY, Work.DROP_AUTHORITY, Work.SIGN],
    ),
    "the next one lost its key": (
        replace(announced(TRUST_TIME * 2), following=None),
        [Work.ANNOUNCE_AUTHORITY],
    ),
    "a former authority": (replace(GOOD, bundle=(ca("a"), ca("z", OLD))), []),
    "a former authority that has expired": (
        replace(GOOD, bundle=(ca("a"), ca("z", EXPIRED))),
        [Work.DROP_AUTHORITY],
    ),
    "the only authority has expired": (
        replace(GOOD, bundle=(ca("a", EXPIRED),)),
        [Work.MAKE_AUTHORITY, Work.DROP_AUTHORITY, Work.SIGN],
    ),
}


@pytest.mark.parametrize(("before", "expected"), CASES.values(), ids=CASES)
def test_due_certificate_changes(before: CertificateState, expected: list[Work]) -> None:
    due = due_changes(before, WANTED, NOW)
    assert [change.work for change in due] == expected
    assert all(change.reason for change in due)


def test_authority_not_yet_trusted_by_etcd_members_does_not_sign() -> None:
    before = announced(TRUST_TIME * 3)
    assert due_changes(before, replace(WANTED, trusted=False), NOW) == ()


def renewed(data: Data, now: datetime, wanted: Wanted = WANTED) -> tuple[Data, list[Work]]:
    due = due_changes(parse_data(data), wanted, now)
    return apply_changes(data, due, wanted, now), [change.work for change in due]


def trusted_keys(data: Data) -> list[str]:
    found = (
        certificates.read_certificate(block) for block in certificates.pem_blocks(data[BUNDLE])
    )
    return [one.key for one in found if one is not None]


def test_new_certificates_are_valid_and_stay_unchanged() -> None:
    data, works = renewed({}, NOW)
    assert works == [Work.MAKE_AUTHORITY, Work.SIGN, Work.MAKE_PASSWORD]
    made = certificates.read_certificate(data[CERT])
    assert made is not None
    assert made.names == NAMES
    assert made.issuer_key == certificates.public_key_id(data[SIGNING_KEY])
    assert (made.ends - NOW, NOW - made.begins) == (LEAF_LIFE, BACKDATED)
    assert data[USER] == b"root"
    assert len(data[PASSWORD]) >= 32
    assert renewed(data, NOW + DAY) == (data, [])
    other, _ = renewed({}, NOW)
    assert all(data[key] != other[key] for key in (PASSWORD, SIGNING_KEY, KEY))


def test_year_of_daily_runs_renews_only_etcd_certificate() -> None:
    data, _ = renewed({}, NOW)
    seen = []
    for day in range(366):
        data, works = renewed(data, NOW + day * DAY)
        seen += works
    assert seen == [Work.SIGN]


def test_authority_rotation_keeps_trust_without_gap() -> None:
    """Daily for thirteen years: a client with a bundle of at most a day ago trusts etcd today."""
    data, _ = renewed({}, NOW)
    seen: list[tuple[int, Work]] = []
    trusted = [trusted_keys(data)]
    for day in range(1, 13 * 365):
        data, works = renewed(data, NOW + day * DAY + day * timedelta(seconds=1))
        seen += [(day, work) for work in works if work is not Work.SIGN]
        trusted.append(trusted_keys(data))
        shown = certificates.read_certificate(data[CERT])
        assert shown is not None
        assert shown.issuer_key in trusted[-2]
        assert shown.ends > NOW + day * DAY + 30 * DAY
    (announced_on, first), (promoted_on, second), (dropped_on, third) = seen
    assert (first, second, third) == (
        Work.ANNOUNCE_AUTHORITY,
        Work.PROMOTE_AUTHORITY,
        Work.DROP_AUTHORITY,
    )
    assert announced_on * 3 == pytest.approx(AUTHORITY_LIFE.days * 2, rel=0.01)
    assert promoted_on - announced_on == 1
    assert dropped_on == pytest.approx(AUTHORITY_LIFE.days, abs=1)
    assert FOLLOWING_KEY not in data
    assert len(trusted[-1]) == 1


@pytest.mark.parametrize(
    "harm",
    [
        {CERT: b"no certificate"},
        {KEY: b"no key"},
        {KEY: b""},
        {"operator.crt": None},
        {"agents.key": b"no key"},
        {CERT: None},
        {BUNDLE: b"no bundle"},
        {SIGNING_KEY: b"no key"},
        {USER: b"somebody"},
        {PASSWORD: b""},
    ],
    ids=lambda harm: "-".join(f"{key}={value!r}" for key, value in harm.items()),
)
def test_damaged_entries_are_replaced_and_others_kept(harm: dict[str, bytes | None]) -> None:
    data, _ = renewed({}, NOW)
    harmed = {key: value for key, value in (data | harm).items() if value is not None}
    after, works = renewed(harmed, NOW)
    assert works
    assert renewed(after, NOW) == (after, [])
    if PASSWORD not in harm and USER not in harm:
        assert after[PASSWORD] == data[PASSWORD]
    if BUNDLE not in harm:
        assert trusted_keys(data)[0] in trusted_keys(after)


def test_certificate_does_not_outlive_its_authority() -> None:
    made = certificates.new_authority(NOW - AUTHORITY_LIFE + 10 * DAY)
    signed = certificates.read_certificate(certificates.sign_certificate(made, NAMES, NOW).cert)
    own = certificates.read_certificate(made.cert)
    assert signed is not None
    assert own is not None
    assert signed.ends == own.ends


def test_two_authorities_have_different_names() -> None:
    """A chain is searched by name first: TLS libraries differ when two authorities share one."""
    made = [certificates.new_authority(NOW).cert for _ in range(2)]
    subjects = {x509.load_pem_x509_certificate(cert).subject for cert in made}
    assert len(subjects) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unreachable("get secrets ns/etcd", "no answer"), Exit.TRY_AGAIN),
        (Conflict("patch secrets ns/etcd", "changed"), Exit.TRY_AGAIN),
        (AlreadyExists("create secrets ns/etcd", "exists"), Exit.TRY_AGAIN),
        (Forbidden("create secrets ns/etcd", "not allowed"), Exit.REFUSED),
        (ForeignSecret("not ours"), Exit.REFUSED),
    ],
)
def test_exit_status_says_if_retry_is_useful(
    error: Exception,
    status: Exit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fails(request: object) -> list[str]:
        raise error

    monkeypatch.setattr(certs_command, "_connected", fails)
    arguments = ["--namespace=ns", "--secret=etcd", "--dns-name=etcd"]
    assert certs_command.main(arguments) == status
    assert capsys.readouterr().err == f"error: {error}\n"
