# Two commands do everything on a fresh machine: `make app` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Tests run side by side, one worker a core; from four cores on five, as the two groups of browser tests mostly wait.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); [ $$n -ge 4 ] && echo 5 || echo $$n)

.PHONY: app test quick check bench docs gallery gpu card film browser clean

app: .venv/.app          ## start the app on http://localhost:8501; MODEL=path/file.py:factory offers a model of yours, WEIGHTS=FILE its weights
	$(BIN)/streamlit run app.py $(if $(MODEL)$(WEIGHTS),--) $(if $(MODEL),--model $(MODEL)) $(if $(WEIGHTS),--weights $(WEIGHTS))

test: .venv/.test browser ## every test, the browser tests included
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

quick: .venv/.test       ## the tests that take less than five seconds each, no browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not browser"

check: .venv/.test       ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu: .venv/.test        ## everything that only a GPU can show, below eight minutes; leaves gpu-report/report.md
	$(BIN)/python -m tests.gpu

card: .card/.ready       ## torch's own CUDA build on a card that is not there: what needs no values and no clock
	.card/bin/python -m tests.gpu.imaginary

bench: .venv/.test browser ## figures: ratios and medians, see benchmarks/README.md
	$(BIN)/python -m benchmarks

gallery: .venv/.app      ## sample models and lessons as pages without a server: open gallery/index.html
	$(BIN)/python -m explorer gallery --out gallery

film: .venv/.test browser ## the pictures at the top of the README, taken from the real page
	$(BIN)/python .github/film.py

docs: .venv/.docs        ## the documents as a site in site/, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

browser: .venv/.test
	@$(BIN)/python tests/browser/chromium.py

.venv/.app: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.test: .venv/.app tests/requirements.txt tests/frameworks.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/frameworks.txt
	@touch $@

.venv/.docs: docs/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

# The CUDA build is the wheel without a local version (===), and the stubs stand for the nvidia wheels (--no-deps).
.card/.torch: requirements.txt
	test -x .card/bin/python || $(PYTHON) -m venv .card
	@.card/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		"torch===$(patsubst torch==%,%,$(filter torch==%,$(file < requirements.txt)))" \
		|| { echo "Nothing was judged: no wheel of torch's CUDA build could be had."; exit 1; }
	@touch $@

.card/.ready: .card/.torch tests/gpu/imaginary.txt
	.card/bin/python -m pip install --quiet --disable-pip-version-check -r tests/gpu/imaginary.txt
	.card/bin/python -m pip install --quiet --disable-pip-version-check --no-deps bitsandbytes==0.49.2  # it asks for torch
	@touch $@

clean:
	rm -rf .venv .card .pytest_cache .mypy_cache .ruff_cache .hypothesis
