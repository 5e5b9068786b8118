# What a developer types. `make help` lists it; CI calls the same targets.

GO      ?= go
# RACE= (empty) turns the race detector off for a quicker look.
RACE    ?= -race
# Tests that need more than this are stuck.
TIMEOUT ?= 30m
# What the binaries say of themselves; a tree without git says nothing.
RELEASE ?= $(shell git describe --tags --always --dirty 2>/dev/null)
# Findings are cached with the paths of the tree they were made in, so each tree has its own cache.
LINT     = GOLANGCI_LINT_CACHE=$(CURDIR)/.cache/golangci-lint $(GO) tool -modfile=tools/go.mod golangci-lint

.DEFAULT_GOAL := help
.PHONY: help build sanity test bench demo conformance check fmt lint schema clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binaries into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ \
		-ldflags='-X github.com/oxidecomputer/oxide-csi-plugin/driver.Release=$(RELEASE)' ./cmd/...

sanity: ## the main job: csi-sanity and our own specs against driver and simulated rack
	@tools/prerequisites
	$(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./sanity/...

test: ## every test, sanity included
	@tools/prerequisites
	$(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) ./...

bench: ## measure: driver against the same work by hand, memory, start-up, sizes
	@tools/prerequisites
	$(GO) test -count=1 -timeout=$(TIMEOUT) -run '^$$' -bench . -benchtime=15x -v ./sanity/...

demo: ## watch a volume live: born, mounted on A, written, moved to B, read back
	@tools/prerequisites
	@$(GO) run ./cmd/oxide-conformance demo

conformance: ## the suite against the rack that OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT name
	@$(GO) build -o bin/ ./cmd/oxide-conformance && bin/oxide-conformance

check: fmt lint test ## what must be green before a commit is shared

fmt: ## say which files gofmt and goimports would change
	$(LINT) fmt --diff

lint: ## vet, style, and the walls between the packages
	$(LINT) run

schema: ## check the simulator's answers against a rack's OpenAPI document: make schema SPEC=FILE
	@test -n "$(SPEC)" || { echo "make schema: name the rack's OpenAPI document: make schema SPEC=FILE" >&2; exit 1; }
	OXIDE_OPENAPI=$(abspath $(SPEC)) $(GO) test -tags=openapi -count=1 -run Schema ./simulator/

clean: ## remove what was built
	rm -rf bin .cache
