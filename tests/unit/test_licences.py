"""Licences of the packages in the images: known, accepted, listed."""

from __future__ import annotations

from email.message import Message

import pytest

from scripts import licences
from scripts.licences import LicenceError, Policy, expression, is_accepted

ACCEPTED = frozenset({"MIT", "Apache-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"})


def test_page_is_up_to_date() -> None:
    assert licences.PAGE.read_text() == licences.page(licences.policy())


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0", True),
        ("MIT OR GPL-3.0-only", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("MIT AND (GPL-3.0-only OR Apache-2.0)", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", True),
        ("GPL-2.0-only", False),
    ],
)
def test_expression_is_accepted_by_its_terms(text: str, accepted: bool) -> None:
    assert is_accepted(text, ACCEPTED) is accepted


@pytest.mark.parametrize(
    ("fields", "named", "found"),
    [
        ({"License-Expression": "MIT"}, {}, "MIT"),
        ({"License-Expression": "MIT", "License": "ISC"}, {"a": "ISC"}, "MIT"),
        ({"License": "apache-2.0"}, {}, "Apache-2.0"),
        ({"License": "Apache 2.0"}, {"a": "Apache-2.0"}, "Apache-2.0"),
        ({"License": "a licence of our own"}, {}, None),
        ({"License": "UNKNOWN"}, {}, None),
        ({}, {}, None),
    ],
)
def test_licence_comes_from_the_metadata_or_is_named(
    fields: dict[str, str], named: dict[str, str], found: str | None
) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert expression("a", metadata, named) == found


def test_licence_that_is_not_accepted_is_refused() -> None:
    rules = licences.policy()
    with pytest.raises(LicenceError, match=r"certifi: MPL-2\.0 is not accepted in licences\.toml"):
        licences.licences("operator", Policy(rules.accepted - {"MPL-2.0"}, rules.named))


def test_package_without_licence_is_refused() -> None:
    rules = licences.policy()
    with pytest.raises(LicenceError, match=r"etcd-sdk-python: its metadata has no SPDX licence"):
        licences.licences("sidecar", Policy(rules.accepted, {}))
