"""Paths in this repository, independent of the place of a test."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Root folder of the repository."""
