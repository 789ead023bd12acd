"""How whoever runs a job asks its agents what they know of the rendezvous, and proves who it is.

`GET /rendezvous` of an agent, for backends of which there is no mirror, with the two headers here.
The answer is `{"backend": …, "records": [{"key": …, "value": {…}}]}`: the records of `records.py`
with keys relative to the job's prefix, as they would stand in etcd. Owns the proof alone.
"""

from __future__ import annotations

import hashlib
import hmac

PATH = "/rendezvous"
TIME_HEADER = "X-ElasticJob-Time"
"""Milliseconds since 1970, in digits."""
PROOF_HEADER = "X-ElasticJob-Proof"


def proof(job_key: bytes, time_ms: str) -> str:
    """The value of `PROOF_HEADER`: hex HMAC-SHA256 over what is asked and when."""
    return hmac.new(job_key, f"rendezvous {time_ms}".encode(), hashlib.sha256).hexdigest()


def proven(job_key: bytes, time_ms: str, given: str) -> bool:
    """Whether the asker knows the job's key. The question changes nothing, so no time is stale."""
    return hmac.compare_digest(proof(job_key, time_ms).encode(), given.encode())


def headers(job_key: bytes, now_ms: int) -> dict[str, str]:
    """Both headers of a question asked now."""
    time_ms = str(now_ms)
    return {TIME_HEADER: time_ms, PROOF_HEADER: proof(job_key, time_ms)}
