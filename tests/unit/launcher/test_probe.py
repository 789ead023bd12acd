"""Answers to probes, and their signature."""

from __future__ import annotations

import hashlib
import hmac

from elasticjob_launcher.probe import answer, signature

KEY = b"key"
BODY = {"workers": 2, "member": "pod-0", "agent_attached": True, "round": None, "session": "s"}
CANONICAL = b'{"agent_attached":true,"member":"pod-0","round":null,"session":"s","workers":2}'
NONCE = "0123456789abcdef"


def test_signature_covers_nonce_and_body() -> None:
    told = answer({"nonce": NONCE}, KEY, BODY)
    expected = hmac.new(KEY, NONCE.encode() + CANONICAL, hashlib.sha256).hexdigest()
    assert told == {**BODY, "hmac": expected}
    assert signature(KEY, NONCE, told) == expected  # a prober passes the answer on unchanged
    assert signature(KEY, NONCE, {**told, "workers": 0}) != expected
    assert signature(KEY, "f" * 16, told) != expected
    assert signature(b"other", NONCE, told) != expected


def test_launcher_without_agent_has_no_key_to_sign_with() -> None:
    assert answer({"nonce": NONCE}, b"", BODY) == {
        "error": "no agent has attached to this launcher yet"
    }
