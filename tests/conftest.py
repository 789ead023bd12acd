"""Settings of all tests: no deadline for Hypothesis, and default signal handling.

Property tests have no time limit, because other programs share the machine. Signals are reset so
that they end programs even if the tests run in the background or under `nohup`.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A background shell ignores these signals, and every program started by a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
