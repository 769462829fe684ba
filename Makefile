# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RUN = runs/digits
SAMPLES = $(RUN)/samples/demo

.PHONY: demo test lint clean

# The virtual environment, installed once and again when the requirements change.
$(VENV)/installed: pyproject.toml
	@echo "installing into $(VENV): one to some minutes, several GB where torch comes with CUDA"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

# Trains on the built-in digits (or goes on, or finds it done), then samples and evaluates.
demo: $(VENV)/installed
	if [ -e $(RUN)/latest ]; then \
		$(BIN)/python train_sit.py --resume $(RUN); \
	else \
		$(BIN)/python train_sit.py --config configs/digits.yaml; \
	fi
	$(BIN)/python sample/grid.py --checkpoint $(RUN)/latest
	$(BIN)/python sample/generate.py --checkpoint $(RUN)/latest --out $(SAMPLES) \
		--num-samples 1000 --labels balanced --guidance.scale 1.5 --steps 25 --batch-size 250
	$(BIN)/python evaluate/metrics.py $(SAMPLES)/samples.npz --reference digits:held-out \
		--features pixels --floor digits:train --agreement digits --neighbours digits:train

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What make and pip built. Runs stay, and so does an environment that make did not install.
clean:
	if [ -e $(VENV)/installed ]; then rm -rf $(VENV); fi
	rm -rf build *.egg-info
