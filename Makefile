# make demo | make test | make quick | make lint | make soak | make chaos | make check-NAME | make deploy-check | make dist | make docs | make protos
# | make site | make release-check | make check-protos | make chart-schema | make sanitize
# PYTHON: an interpreter, 3.11 or newer.  TORCH: what pip installs if that interpreter has no usable torch,
# e.g. TORCH="torch --index-url https://download.pytorch.org/whl/cpu" for the small CPU build.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell command -v $(p) >/dev/null && $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
TORCH ?= torch==2.13.0
BIN := .venv/bin
UNREACHABLE := pip failed. If it found no versions at all, it reached no package index: make demo PIP_INDEX_URL=... names another than PyPI
# Else half of an environment, made by a Python without its venv package (python3-venv on Debian), would count as a whole one.
.DELETE_ON_ERROR:
# --no-compile: the first import compiles the modules that are needed, in a tenth of the time for all 18,000.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
SOURCES := mesh worker cli launcher gateway scheduler prefill_svc decode_svc kvstore engine kernels transfer tools eval loadgen capacity sim models bench deploy tests

BEHIND_ENVOY := tests/gateway/test_generate.py tests/gateway/openai tests/gateway/messages tests/gateway/responses

SANITIZER := compute-sanitizer --report-api-errors no --error-exitcode 1

QUICK := tests/test_architecture.py tests/test_documents.py tests/gateway tests/scheduler tests/prefill_svc tests/decode_svc tests/worker tests/engine tests/transfer tests/kvstore tests/mesh tests/launcher tests/loadgen

.PHONY: demo test quick pytest dist soak chaos lint docs site release-check protos check-protos chart-schema deploy-check sanitize clean

demo: .venv/installed
	$(BIN)/deepmesh demo

# Mypy takes half a minute on one core, and therefore runs while the tests do.
test: .venv/installed-dev
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: .venv/installed-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

# What a change should pass before it is committed, in a minute or two on two cores: ruff, and the tests that need neither
# torch nor a process (tests/support/quick.py).
quick: .venv/installed-dev
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/ruff format --quiet --check $(SOURCES)
	$(BIN)/python -m pytest --quick --quiet --numprocesses auto --maxprocesses 4 --dist loadgroup $(QUICK)

# Runs every property test with thousands of examples, for minutes to hours.
soak: .venv/installed-dev
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile soak -o timeout=0 --numprocesses auto --dist loadgroup

# Kills, freezes and stops every process in every phase of a request, for minutes. DEEPMESH_CHAOS_SEED=n draws other
# prompts and times.
chaos: check-chaos

# Builds three wheels, with which any machine can serve, and no others: deepmesh, its contracts, and tiny-r1. setuptools would also
# pack what earlier builds left in build/, such as modules that are gone by now.
dist: .venv/installed
	rm -rf dist build protos/build models/build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist ./protos ./models .

# Lints and renders the chart, and checks it against Kubernetes' schemas. Needs node for helm and for custom resources'
# schemas.
deploy-check: .venv/installed-deploy deploy/check/node_modules check-deploy

# Tests the chart in the cluster that kubectl reaches, in namespaces of its own: all sizes, install, upgrade, uninstall. Pods need not run.
check-cluster: .venv/installed-deploy deploy/check/node_modules

# Runs the tests with Envoy, then the suites of the gateway's gRPC and HTTP with clients that reach it through Envoy.
check-envoy: .venv/installed-deploy
	$(BIN)/python -m pytest --check=envoy -o timeout=0
	DEEPMESH_BEHIND_ENVOY=1 $(BIN)/python -m pytest --numprocesses auto -o timeout=0 $(BEHIND_ENVOY)

# Tests faults that users of other servers have reported, those that take too long for `make test`.
check-faults: .venv/installed-dev

# Looks at the optimized machine code of all CUDA sources, of which `make test` takes four. Needs no GPU.
check-cuda: .venv/installed-dev

# Tests the gateway's page in a real browser and writes docs/page.png. Needs `apt-get install chromium`, or
# DEEPMESH_CHROMIUM=PATH.
check-page: .venv/installed-dev

# Checks Prometheus' rules with promtool, which Debian's package prometheus contains.
check-rules: .venv/installed-dev

# Upgrades a mesh of another version to this one, process by process. AGAINST=a commit, by default the last release.
check-upgrade: .venv/installed-dev

# Follows docs/start from nothing, as a new user would. PYTEST_ADDOPTS=-s shows how long each step takes.
check-first-steps: .venv/installed-dev

# Tests more clients of examples/ than `make test`, if their toolchains are installed (examples/Makefile names them).
check-clients: .venv/installed-dev

# Run other projects' test suites. JSON_SCHEMA_BENCH names a checkout of github.com/guidance-ai/jsonschemabench.
check-ai-sdk check-comply check-langchain check-litellm check-schemas check-schemathesis: .venv/installed-conformance

# Renders published chat templates and compares with transformers. DEEPMESH_CHAT_TEMPLATES names a directory of them.
check-templates: .venv/installed-dev

# The leaderboard's package requires the SDKs of every vendor, and other versions of our packages. Its questions and its
# handlers for OpenAI's API need only the packages below.
check-bfcl: .venv/installed-conformance
	@$(PIP) --constraint tests/conformance/constraints.txt --no-deps bfcl-eval tree-sitter tree-sitter-java tree-sitter-javascript overrides tenacity filelock tqdm
	$(BIN)/python -m pytest --check=bfcl -o timeout=0 -rP tests/conformance/test_bfcl.py

# Installs the wheels of `make dist` into an empty environment.
check-dist: .venv/installed-dev dist

# Runs the demo of the same wheels with the oldest packages that pyproject.toml allows, in an environment of its own.
check-lowest: .venv/installed-dev dist
	@rm -rf out/lowest && mkdir -p out && $(BIN)/python -m venv out/lowest
	@$(BIN)/python -m tools.lowest_versions > out/lowest.txt
	@out/lowest/bin/pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	@out/lowest/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint out/lowest.txt dist/*.whl
	cd out && lowest/bin/deepmesh demo

# Writes the services' configuration keys into the schema of the chart's values.
chart-schema: .venv/installed-dev
	$(BIN)/python deploy/helm/schema.py

# Runs the tests that need one GPU: many side by side, then those that want its whole memory. On an H200 with 16 cores the first take
# three minutes.
ALONE_ON_A_GPU := tests/engine/memory tests/engine/runner/test_device_memory.py
check-gpu: .venv/installed-dev
	$(BIN)/python -m pytest -m "gpu and not multi_gpu" --numprocesses 8 $(addprefix --ignore=,$(ALONE_ON_A_GPU))
	$(BIN)/python -m pytest -m "gpu and not multi_gpu" -o timeout=0 $(ALONE_ON_A_GPU)

# Runs the tests marked check("NAME"), which take too long for `make test`.
check-%: .venv/installed-dev
	$(BIN)/python -m pytest --check=$* -o timeout=0

lint: .venv/installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint

protos: .venv/installed-dev
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. deepmesh/v1/*.proto deepmesh/internal/v1/*.proto deepmesh/keda/*.proto

# Writes the pages that are made from the code.
docs: .venv/installed
	$(BIN)/deepmesh config --markdown > docs/configuration.md
	$(BIN)/python -m tools.metrics_page > docs/metrics.md
	$(BIN)/python -m tools.modules_page > docs/modules.md
	$(BIN)/python -m capacity.choices_page > docs/choices.md
	$(BIN)/python -m deploy.observe.board

# Builds the documentation in out/site. Fails on a broken link.
site: .venv/installed-site
	$(BIN)/mkdocs build --strict --quiet

# Runs all checks that a tag needs besides `make test`; docs/releasing.md has the rest.
release-check: check-release check-dist check-lowest deploy-check check-rules check-protos site

# Compares protos with the last release (the last commit if there is none yet), or with AGAINST=a commit.
check-protos: .venv/installed-dev
	cd protos && against=$${AGAINST:-$$(git describe --tags --abbrev=0 2>/dev/null || git rev-parse HEAD)} && \
	../$(BIN)/buf breaking --against "$$(git rev-parse --path-format=absolute --git-common-dir)#ref=$$(git rev-parse "$$against^{commit}"),subdir=protos"

# Needs a GPU, for exchanges two, and the CUDA toolkit. In the tests of kernels each tensor has an allocation of its own, so that an access
# beyond it is noticed. Graphs, and so the engine, need torch's allocator. Large cases are left out: they would take
# hours and run the same instructions.
sanitize: .venv/installed-dev
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) $(BIN)/python -m pytest -o timeout=0 tests/kernels -k "not captured and not even and not long"
	$(SANITIZER) $(BIN)/python -m pytest -o timeout=0 tests/engine/test_gpu_engine.py -k "change_no_token"
	$(SANITIZER) --target-processes all $(BIN)/python -m pytest -o timeout=0 tests/engine/exchange/test_peer.py -k "random or graphs"
	$(SANITIZER) --tool racecheck $(BIN)/python -m pytest -o timeout=0 tests/kernels/test_mla_decode_gpu.py -k "deepseek and ragged"

# If the interpreter already has a CUDA build of torch, it is kept: the environment then sees the interpreter's
# packages.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "deepmesh needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@if $(PYTHON) -c 'import sys, torch; v = tuple(map(int, torch.__version__.split(".")[:2])); sys.exit(v < (2, 11) or not torch.version.cuda)' 2>/dev/null; \
	then echo "keeping the installed CUDA torch"; $(PYTHON) -m venv --system-site-packages .venv; \
	else echo "creating .venv"; $(PYTHON) -m venv .venv; fi

.venv/installed: .venv/bin/python pyproject.toml protos/pyproject.toml models/pyproject.toml constraints.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH): gigabytes where PyPI's build has CUDA (README.md names a smaller one)"; $(PIP) $(TORCH); } || { echo "$(UNREACHABLE)"; exit 1; }
	@echo "installing deepmesh"
	@$(PIP) -e ./protos -e ./models -e . || { echo "$(UNREACHABLE)"; exit 1; }
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev]'
	@touch $@

.venv/installed-deploy: .venv/installed-dev
	@$(PIP) -e '.[dev,deploy]'
	@touch $@

.venv/installed-site: .venv/installed
	@$(PIP) -e '.[site]'
	@touch $@

.venv/installed-conformance: .venv/installed-dev tests/conformance/constraints.txt
	@$(PIP) --constraint tests/conformance/constraints.txt -e '.[dev,conformance]'
	@touch $@

deploy/check/node_modules: deploy/check/package.json
	npm install --prefix deploy/check --no-audit --no-fund --no-package-lock
	@touch $@

clean:
	rm -rf .venv out checkpoints dist build
