"""What all tests share: a property is no stopwatch, on a machine that others use too, and signals
that end a program do, also where the tests run in the background or under `nohup`."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Who starts us so has them ignored, and so would every program be that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
