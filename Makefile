# Every target first installs its dependencies: pinned, verified, and kept outside the tree in CACHE,
# so that a second run starts in seconds. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

HOME ?= $(shell echo ~)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elasticjob
PY := .venv/bin/python
# Tests of real processes and of pods wait for most of their time.
JOBS ?= $(shell expr $$(nproc) + 3)
E2E_JOBS ?= 4
export ELASTICJOB_ETCD_DIR ?= $(CACHE)
# The tests start thousands of interpreters, which would compile the checkout's modules each time.
unexport PYTHONDONTWRITEBYTECODE
# Both compare contents, so a new checkout checks only the files that differ.
export MYPY_CACHE_DIR ?= $(CACHE)/mypy
export RUFF_CACHE_DIR ?= $(CACHE)/ruff

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

.PHONY: install
install: ## install the Python environments: dependencies in the cache, this checkout in .venv
	@python=$$(scripts/python) && "$$python" -m scripts.environment "$(CACHE)"

.PHONY: demo
demo: install ## run an elastic training job here, scale it and inject faults: build/demo/timeline.png
	$(PY) scripts/demo.py

.PHONY: pictures
pictures: install etcd browser ## redraw the pictures of the documentation from a run and the measured times
	$(PY) -m scripts.pictures

.PHONY: etcd
etcd: install ## install the etcd servers of the tests and benchmarks into the cache
	@$(PY) -m scripts.etcd_servers "$(CACHE)"

.PHONY: kubernetes
kubernetes: install ## install the tests' Kubernetes programs and helm into the cache: minutes, once
	@$(PY) -c 'from tests.cluster.programs import programs; programs("kubernetes"); programs("helm")'

.PHONY: browser
browser: install ## install the browser of the dashboard's tests, with apt, if there is none
	@$(PY) -c 'from tests.integration.browser import installed; installed()'

.PHONY: corpus-suite corpus
corpus-suite: install ## install the ten corpus packages and the frameworks of `make test` into the cache
	@$(PY) -m tests.corpus.environments small
	@$(PY) -m tests.corpus.environments frameworks
	@$(PY) -m tests.corpus.environments deepspeed
	@$(PY) -m tests.corpus.environments peers
corpus: install etcd ## run 95 packages, each in a cold and a warm job; resumable: docs/warm-start-corpus.md
	$(PY) -m tests.corpus

.PHONY: lint types imports
lint: install ## run ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
types: install ## run mypy, strict
	@mkdir -p $(MYPY_CACHE_DIR)
	flock $(MYPY_CACHE_DIR).lock $(PY) -m mypy
imports: install ## check the allowed imports between packages (import-linter)
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()' --no-logo

.PHONY: generate
generate: install ## regenerate files: the CRD and its reference from the models, the chart's copies, versions
	$(PY) -m elasticjob_operator.model.crdgen
	$(PY) -m scripts.chart
	$(PY) -m scripts.completion
	$(PY) -m scripts.reference
	$(PY) -m scripts.licences
.PHONY: template-schema
template-schema: etcd kubernetes ## rewrite the schema of pod templates from the API server's, then the CRD
	$(PY) -m scripts.template_schema
	@$(MAKE) generate
.PHONY: generated
generated: install ## fail if a generated file is out of date
	$(PY) -m elasticjob_operator.model.crdgen --check
	$(PY) -m scripts.chart --check
	$(PY) -m scripts.completion --check
	$(PY) -m scripts.reference --check
	$(PY) -m scripts.lock --check
	$(PY) -m scripts.licences --check

.PHONY: lock sbom audit release-check
UPGRADE ?=
lock: install ## lock the packages of pyproject.toml with hashes: UPGRADE="name name" or UPGRADE=all renews
	$(PY) -m scripts.lock $(if $(filter all,$(UPGRADE)),--upgrade,$(addprefix --upgrade-package=,$(UPGRADE)))
sbom: images ## write the bills of materials of the images, CycloneDX: build/sbom
	$(PY) -m scripts.sbom build/sbom
audit: install ## search the known vulnerabilities of the locked packages; needs the index
	$(PY) -m scripts.audit
release-check: audit generated sbom ## check what a release needs; BASE_IMAGE= must name the base image by digest
	$(PY) -m scripts.sbom build/sbom --release

.PHONY: docs
docs: install ## build the site of the documentation, fail on warnings: build/site
	@$(PY) -m scripts.site $(CACHE)

.PHONY: dist
dist: install ## build the wheel, the sdist and the chart of a release, reproducibly: dist
	@$(PY) -m scripts.dist

.PHONY: format
format: install ## fix lint errors and format the code
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

.PHONY: check
check: lint types imports generated docs ## run lint, types, docs, unit tests, 1,000 simulated schedules: under a minute
	SIM_SEEDS=1000 $(PY) -m pytest -n $(JOBS) --dist worksteal tests/unit tests/sim

# The schedules need processor time and no real time, so they get what the other tests leave. The last
# end-to-end tests run one at a time and wait for most of their time, beside the tests of `servers`.
.PHONY: test schedules servers compiled
test: install ## run all tests: 2,500 schedules, real servers, a real cluster
	@$(MAKE) -j2 --output-sync=target lint types imports generated docs etcd kubernetes browser corpus-suite compiled
	@$(PY) -m scripts.beside build/schedules.log "$(MAKE) schedules" --before build/e2e/claims/alone "$(MAKE) e2e" $(MAKE) servers
# Otherwise each of pytest's workers, which begin at the same time, would compile all of them.
compiled: install ## part of test: compile the tests by their collection
	@mkdir -p build
	@$(PY) -m pytest -qq --collect-only tests/unit tests/integration >build/collected.log || { cat build/collected.log; exit 1; }
schedules: install ## part of test: simulated schedules: SIM_SEEDS=2500
	SIM_SEEDS=$(or $(SIM_SEEDS),2500) $(PY) -m pytest -o cache_dir=build/schedules-cache -o timeout=1800 -n $$(nproc) --dist worksteal tests/sim
servers: install etcd kubernetes browser corpus-suite ## part of test: unit and integration tests
	$(PY) -m scripts.twice -n $(JOBS) --dist worksteal --durations=15 tests/unit tests/integration

.PHONY: mutation
MODULES ?=
mutation: install ## run mutation tests of the protocol's decisions: all in a night, or MODULES="coordinator/closing lease"
	$(PY) -m scripts.mutation $(CACHE) $(MODULES)

.PHONY: e2e
e2e: install etcd ## run the kubectl and helm tests on the running cluster, else on one started for them
	@$(PY) -m tests.cluster images
	$(PY) -m scripts.twice -o cache_dir=build/e2e-cache -o timeout=1800 --durations=10 -n $(E2E_JOBS) tests/e2e

.PHONY: cluster cluster-down images
cluster: install etcd ## start a Kubernetes cluster on this machine: one control plane, two workers
	@$(PY) -m tests.cluster up
cluster-down: install ## remove the cluster and all of its traces on this machine
	@$(PY) -m tests.cluster down
images: install ## build the operator, sidecar and trainer images; load them into the running cluster
	@$(PY) -m tests.cluster images

.PHONY: partitions
RUNS ?= 200
SEED ?= 1
partitions: etcd ## run RUNS real network partitions from SEED on, as root; logs in build/partitions
	$(PY) -m tests.partitions --runs $(RUNS) --seed $(SEED)

.PHONY: bench bench-rendezvous bench-recovery bench-frameworks bench-interop bench-crowd bench-jobs bench-overhead bench-pods bench-goodput gpu-check soak soak-cluster
bench: bench-rendezvous bench-recovery bench-frameworks bench-crowd bench-jobs bench-overhead bench-interop ## run every benchmark
bench-rendezvous: etcd ## time of N processes to get ranks, ours and torch's: build/bench/rendezvous.json
	$(PY) -m bench.rendezvous
bench-recovery: etcd ## time from a fault to the next step, ours and torchrun's: build/bench/recovery.json
	$(PY) -m bench.recovery
bench-frameworks: etcd ## time from a killed worker to the next step of six frameworks: build/bench/frameworks.json
	$(PY) -m bench.frameworks
bench-crowd: etcd ## requests and CPU time per member, up to 1,024 members: build/bench/crowd.json
	$(PY) -m bench.crowd
bench-jobs: etcd kubernetes ## processor time of operator and API server for 100 jobs: build/bench/jobs.json
	$(PY) -m bench.jobs
bench-overhead: etcd ## step time with and without the sidecar: build/bench/overhead.json
	$(PY) -m bench.overhead
bench-interop: etcd ## gangs of torchrun and our nodes through twenty changes each: build/bench/interop.json
	$(PY) -m bench.interop
bench-goodput: etcd ## steps completed under faults, ours and four other systems: build/bench/goodput.json; five hours
	$(PY) -m bench.goodput
bench-pods: install ## recovery of a gang of pods on the cluster of `make cluster`: build/bench/pods.json
	$(PY) -m bench.pods
GPU_PYTHON ?= $(PY)
gpu-check: install ## run NCCL gangs through faults on this machine's GPUs: build/gpu/report.md; GPU_PYTHON= has a CUDA torch
	$(PY) -m bench.gpu --python $(GPU_PYTHON)
soak: install ## run one training job through 200 random faults: build/bench/soak.json
	$(PY) -m bench.soak
soak-cluster: install etcd ## the same in pods, also killing the operator; on the running cluster, else on a new one
	$(PY) -m bench.soak --cluster
