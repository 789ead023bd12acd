"""Real Kubernetes cluster for the end-to-end tests: kind, with or without a registry."""
