"""Reconciliation of jobs: watches, work queue, observation, applying the plan, resync."""
