"""Manifests of a job's objects: pods with their containers and commands, Service, Secret,
PodDisruptionBudget. No I/O."""
