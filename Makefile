# Every target installs what it needs first: pinned, verified, and kept outside the tree in CACHE,
# so that a second run starts in seconds. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

HOME ?= $(shell echo ~)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elasticjob
PY := .venv/bin/python
JOBS ?= auto
export ELASTICJOB_ETCD_DIR ?= $(CACHE)

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

.PHONY: install
install: ## the Python environments: dependencies in the cache, this checkout in .venv
	@python=$$(scripts/python) && "$$python" scripts/environment.py "$(CACHE)"

.PHONY: demo
demo: install ## an elastic training run on this machine, scaled and hurt: build/demo/timeline.png
	$(PY) scripts/demo.py

.PHONY: etcd
etcd: install ## the etcd servers of the tests and benchmarks, in the cache
	@$(PY) -m scripts.etcd_servers "$(CACHE)"

.PHONY: kubernetes
kubernetes: install ## the Kubernetes programs and helm, for the tests, in the cache: minutes, once
	@$(PY) -c 'from tests.cluster.programs import programs; programs("kubernetes"); programs("helm")'

.PHONY: corpus-suite corpus
corpus-suite: install ## the ten packages of the corpus that `make test` runs, in the cache
	@$(PY) -m tests.corpus.environments small
corpus: install etcd ## 90 packages, each in a job cold and warm: docs/warm-start-corpus.md; goes on where it was
	$(PY) -m tests.corpus

.PHONY: lint types imports
lint: install ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
types: install ## mypy, strict
	$(PY) -m mypy
imports: install ## import-linter: the arrows between the packages
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()' --no-logo

.PHONY: generate generated
generate: install ## write the generated files again: the CRD, from the models; the chart's copies
	$(PY) -m elasticjob_operator.model.crdgen
	$(PY) -m scripts.chart
generated: install ## fail if a generated file is not what it is made from
	$(PY) -m elasticjob_operator.model.crdgen --check
	$(PY) -m scripts.chart --check

.PHONY: format
format: install ## put the code into its one shape
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

.PHONY: check
check: lint types imports generated ## lint, types, unit tests, 1,000 simulated schedules: under a minute
	SIM_SEEDS=1000 $(PY) -m pytest -n $(JOBS) tests/unit tests/sim

.PHONY: test
test: lint types imports generated etcd kubernetes corpus-suite ## everything, with 10,000 schedules, real servers, a real cluster
	SIM_SEEDS=10000 $(PY) -m scripts.twice -n $(JOBS) tests/unit tests/sim tests/integration
	@$(MAKE) e2e

.PHONY: mutation
MODULES ?=
mutation: install ## mutation testing of the protocol's decisions, for a night: MODULES="verdicts counts" for some
	$(PY) -m scripts.mutation $(CACHE) $(MODULES)

.PHONY: e2e
e2e: install etcd ## what users do with kubectl and helm, on a cluster brought up for it unless one runs
	@$(PY) -m tests.cluster images
	$(PY) -m scripts.twice -o timeout=1800 --durations=10 tests/e2e

.PHONY: cluster cluster-down images
cluster: install etcd ## a Kubernetes cluster on this machine: one control plane, two workers
	@$(PY) -m tests.cluster up
cluster-down: install ## remove the cluster and whatever it left on this machine
	@$(PY) -m tests.cluster down
images: install ## the operator's, sidecar's and trainers' images, also in the cluster if it runs
	@$(PY) -m tests.cluster images

.PHONY: partitions
RUNS ?= 200
SEED ?= 1
partitions: etcd ## real network partitions, as root: RUNS of them from SEED on; logs in build/partitions
	$(PY) -m tests.partitions --runs $(RUNS) --seed $(SEED)

.PHONY: bench bench-rendezvous bench-recovery bench-interop bench-crowd bench-overhead bench-pods soak soak-cluster
bench: bench-rendezvous bench-recovery bench-crowd bench-overhead bench-interop ## every benchmark
bench-rendezvous: etcd ## N processes to their ranks, ours and torch's: build/bench/rendezvous.json
	$(PY) -m bench.rendezvous
bench-recovery: etcd ## a fault to the next training step, ours and torchrun's: build/bench/recovery.json
	$(PY) -m bench.recovery
bench-crowd: etcd ## a round of up to 1,024 members, requests and processor time each: build/bench/crowd.json
	$(PY) -m bench.crowd
bench-overhead: etcd ## training steps with and without the sidecar: build/bench/overhead.json
	$(PY) -m bench.overhead
bench-interop: etcd ## torchrun and our nodes in one gang, through twenty changes each: build/bench/interop.json
	$(PY) -m bench.interop
bench-pods: install ## faults to a gang in pods, on the cluster of `make cluster`: build/bench/pods.json
	$(PY) -m bench.pods
soak: install ## one training run through 200 random faults: build/bench/soak.json
	$(PY) -m bench.soak
soak-cluster: install etcd ## the same in pods, the operator killed too; on a cluster brought up for it unless one runs
	$(PY) -m bench.soak --cluster
