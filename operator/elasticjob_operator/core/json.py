"""The shape of Kubernetes' objects as they travel."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
