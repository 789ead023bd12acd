"""The real Kubernetes cluster of the end-to-end tests: kind, also where there is no registry."""
