# What a developer types. `make help` lists it; CI calls the same targets.

GO      ?= go
# RACE= (empty) turns the race detector off for a quicker look.
RACE    ?= -race
# What the proofs are repeatable by, and how long all of a soak takes.
SEED     ?= 1
DURATION ?= 30m
# Tests that need more than this are stuck.
TIMEOUT ?= 30m
# What `make e2e` runs: specs whose text matches FOCUS, or whose labels match LABEL, on that version
# of Kubernetes. Without either it is all but the long ones. PREVIOUS is the tag or commit that it
# upgrades from, if not e2e/run's own. RELEASED is a folder of `make release`, to be installed by
# Helm in the place of the tree's chart and images: FOCUS='install, upgrade and remove'.
FOCUS      ?=
LABEL      ?=
KUBERNETES ?= v1.35.8
PREVIOUS   ?=
RELEASED   ?=
# What `make mutants` changes, in how many places of each, which other packages' tests run, too, and
# how long the tests of one change may take.
PACKAGES ?= driver/volume driver/rack driver/controller
COUNT    ?= 100
BUDGET   ?= 1h
# What the images are made for.
ARCH     ?= amd64 arm64
# What the binaries say of themselves; a tree without git says nothing.
RELEASE ?= $(shell git describe --tags --always --dirty 2>/dev/null)
# Where binaries go.
BIN      = bin
# What `make release` makes, and where: VERSION=v1.2.3; IMAGES= makes none; BASE=FILE is a tar of
# Debian's root file system, as the base of the images where no registry is reached.
VERSION  =
DIST     = dist
IMAGES   = yes
BASE     =
# A copy of Go's vulnerability database, file:///DIRECTORY, instead of the published one.
VULNDB   =
# Findings are cached with the paths of the tree they were made in, so each tree has its own cache.
LINT     = GOLANGCI_LINT_CACHE=$(CURDIR)/.cache/golangci-lint $(GO) tool -modfile=tools/go.mod golangci-lint
MODULE   = github.com/oxidecomputer/oxide-csi-plugin
SAYS     = -X $(MODULE)/driver.Release=$(RELEASE) -X $(MODULE)/simulator/program.Release=$(RELEASE) \
	-X $(MODULE)/keeper.Release=$(RELEASE) -X main.Release=$(RELEASE)
E2E      = $(GO) run ./e2e/run $(if $(FOCUS),-focus '$(FOCUS)') $(if $(LABEL),-label '$(LABEL)') \
	$(if $(filter long,$(LABEL)),-timeout 4h) $(if $(PREVIOUS),-previous '$(PREVIOUS)') $(if $(RELEASED),-release '$(abspath $(RELEASED))')

.DEFAULT_GOAL := help
.PHONY: help build binaries sanity test proofs soak e2e e2e-offline e2e-down bench demo docs conformance conformance-simulator
.PHONY: check mutants size fmt lint vulncheck manifests schema release release-check clean under-test

# The proofs of data safety, each a package below sanity/ and a target here.
PROOFS   = corpus crash powercut faults model concurrency fuzz keeper
# Where a proof lies.
PROOF    = $(if $(filter keeper,$(1)),./keeper/model,./sanity/$(1))
# The programs that the suite and the proofs start, built once for all packages.
PROGRAMS = .cache/under-test
FIGURES  = .cache/figures
SUITE    = OXIDE_SIMULATOR=$(CURDIR)/$(PROGRAMS)/oxide-simulator \
	OXIDE_CSI_PLUGIN=$(CURDIR)/$(PROGRAMS)/oxide-csi-plugin \
	OXIDE_CONFORMANCE=$(CURDIR)/$(PROGRAMS)/oxide-conformance \
	PROOF_FIGURES=$(CURDIR)/$(FIGURES) PROOF_SEED=$(SEED)

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the binaries into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ -ldflags='$(SAYS)' ./cmd/...

binaries: ## compile what the images are made of: bin/linux-amd64 and bin/linux-arm64 (ARCH=amd64 for one)
	@for arch in $(ARCH); do \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch GOAMD64=v1 GOARM64=v8.0 $(GO) build -trimpath \
			-buildvcs=false -o $(BIN)/linux-$$arch/ -ldflags='-s -w $(SAYS)' ./cmd/... || exit 1; \
	done

sanity: ## the main job: csi-sanity and our own specs against driver and simulated rack
	@tools/prerequisites
	$(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./sanity

# Three packages at once also where there are two cores: most wait more than they compute.
test: under-test ## every test: sanity, the proofs in their short form, and each package's own
	@tools/prerequisites --browser
	@rm -f $(FIGURES)
	$(GO) test -C tools -timeout=$(TIMEOUT) ./mutants ./release ./size
	$(GO) test -C tools -count=1 ./walls
	$(GO) test -C tools/monitoring -count=1 .
	$(SUITE) $(GO) test $(RACE) -p=3 -count=1 -timeout=$(TIMEOUT) ./...
	@cat $(FIGURES)

proofs: under-test ## the proofs of data safety alone: make proofs SEED=7; make crash runs one
	@rm -f $(FIGURES)
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) $(foreach p,$(PROOFS),$(call PROOF,$p))
	@cat $(FIGURES)

.PHONY: $(PROOFS)
$(PROOFS): under-test
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v $(call PROOF,$@)

soak: under-test ## the proofs in their long form, in turn: make soak DURATION=2h SEED=7 (the fault matrix runs whole, however short)
	@rm -f $(FIGURES)
	@for proof in $(foreach p,$(PROOFS),$(call PROOF,$p)); do \
		echo "soak: $$proof, its share of $(DURATION)"; \
		$(SUITE) PROOF_DURATION=$(DURATION) PROOF_SHARES=$(words $(PROOFS)) \
			$(GO) test $(RACE) -count=1 -timeout=0 -v $$proof || exit 1; \
	done
	@cat $(FIGURES)

e2e: ## the suite on a kind cluster, with published images: make e2e FOCUS=CP-10 KEEP=1 KUBERNETES=v1.36.4
	@$(E2E) -kubernetes $(KUBERNETES)

e2e-offline: ## the same suite, every image built on this machine: Go modules and Debian's packages alone
	@$(E2E) -offline

e2e-down: ## remove what a run with KEEP=1 has left
	@$(GO) run ./e2e/run -down

under-test:
	@tools/prerequisites
	@$(GO) build $(RACE) -o $(PROGRAMS)/ ./cmd/...

bench: ## measure: driver against the same work by hand, where the time of a stage and of a publish goes, memory (OXIDE_CSI_PLUGIN_BEFORE=FILE: against an earlier one), start-up, sizes
	@tools/prerequisites
	$(GO) test -count=1 -timeout=$(TIMEOUT) -p=1 -run '^$$' -bench . -benchtime=15x -v ./driver/filesystem ./sanity

demo: ## watch a volume live: born, mounted on A, written, moved to B, read back
	@tools/prerequisites
	@$(GO) run ./cmd/oxide-conformance demo

conformance: ## the suite against the rack that OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT name, from inside an instance
	@CGO_ENABLED=0 $(GO) build -o bin/ ./cmd/oxide-conformance && bin/oxide-conformance run

docs: under-test ## check the documentation, and run the commands in it that need no cluster
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) ./docs

conformance-simulator: under-test ## the same program against a simulated rack, with hot-plug and without
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./sanity/conformance -run 'ARackWith(out)?HotPlug'

mutants: ## change the driver in small places and see what its tests notice: make mutants PACKAGES=driver/mount TESTS=driver/node BUDGET=30s COUNT=200 SEED=7
	@$(GO) build -C tools -o $(CURDIR)/.cache/mutants ./mutants
	@.cache/mutants -n $(COUNT) -seed $(SEED) $(if $(TESTS),-tests $(TESTS)) -budget $(BUDGET) $(PACKAGES)

size: ## lines, files and exported identifiers of each package
	@$(GO) run -C tools ./size $(CURDIR)

check: fmt lint test ## what must be green before a commit is shared

fmt: ## say which files gofmt and goimports would change
	$(LINT) fmt --diff

lint: ## vet, also for macOS and illumos, style, the walls between the packages, and the workflows
	$(GO) run -C tools ./walls $(CURDIR)
	$(LINT) run --allow-parallel-runners
	GOOS=darwin $(GO) vet -tags e2e ./...
	GOOS=illumos $(GO) vet -tags e2e ./...
	$(GO) tool -modfile=tools/go.mod actionlint -shellcheck= -pyflakes=

vulncheck: ## fail if the programs reach a known vulnerability; asks vuln.go.dev (VULNDB=file:///DIRECTORY for a copy of it)
	@$(GO) tool -modfile=tools/go.mod govulncheck $(if $(VULNDB),-db $(VULNDB)) ./cmd/... || { \
		status=$$?; \
		[ $$status -eq 3 ] || echo "make vulncheck: nothing was checked. It needs the vulnerability" \
			"database: reach vuln.go.dev, or name a copy of it with VULNDB=file:///DIRECTORY" >&2; \
		exit $$status; }

manifests: ## render the plain manifests from the Helm chart again
	$(GO) test -count=1 ./deploy -run TestThePlainManifestsAreTheChartRendered -update

schema: ## check the simulator's answers against a rack's OpenAPI document: make schema SPEC=FILE
	@test -n "$(SPEC)" || { echo "make schema: name the rack's OpenAPI document: make schema SPEC=FILE" >&2; exit 1; }
	OXIDE_OPENAPI=$(abspath $(SPEC)) $(GO) test -tags=openapi -count=1 -run Schema ./simulator/

release: ## make all that users of a version need in dist/: make release VERSION=v1.2.3 (ARCH=amd64 for one; IMAGES= without images)
	@$(GO) run -C tools ./release -version '$(VERSION)' -out '$(abspath $(DIST))' -arch '$(ARCH)' \
		-images=$(if $(IMAGES),true,false) $(if $(BASE),-base '$(abspath $(BASE))')

release-check: ## make a release with images twice, compare, and look at them: root, buildah and mmdebstrap
	@$(GO) test -C tools -tags images -count=1 -timeout=$(TIMEOUT) -v -run TestImages ./release

clean: ## remove what was built
	rm -rf bin dist .cache
