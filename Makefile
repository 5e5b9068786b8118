# `make help` lists what a developer, CI and an operator type, `make help-all` the rest. CI has no
# steps of its own: .ci/run and the workflows call these targets, first of all `make check`.

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
PACKAGES ?= internal/volume internal/rack driver/controller
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
# What does not need the race detector is built as a release is, so that Go compiles and keeps the
# libraries in one form less.
PLAIN    = CGO_ENABLED=0 GOFLAGS='$(strip $(GOFLAGS) -trimpath)'
# Findings are cached with the paths of the tree they were made in, so each tree has its own cache.
LINT     = $(PLAIN) GOLANGCI_LINT_CACHE=$(CURDIR)/.cache/golangci-lint $(GO) tool -modfile=tools/go.mod golangci-lint
MODULE   = github.com/oxidecomputer/oxide-csi-plugin
SAYS     = -X $(MODULE)/driver.Release=$(RELEASE) -X $(MODULE)/simulator/program.Release=$(RELEASE) \
	-X $(MODULE)/keeper.Release=$(RELEASE) -X main.Release=$(RELEASE)
E2E      = $(PLAIN) $(GO) run ./e2e/run $(if $(FOCUS),-focus '$(FOCUS)') $(if $(LABEL),-label '$(LABEL)') \
	$(if $(filter long,$(LABEL)),-timeout 4h) $(if $(PREVIOUS),-previous '$(PREVIOUS)') $(if $(RELEASED),-release '$(abspath $(RELEASED))')

.DEFAULT_GOAL := help
.PHONY: help help-all build binaries sanity test proofs soak e2e e2e-offline e2e-down bench demo docs conformance conformance-simulator
.PHONY: check mutants size fmt lint vulncheck manifests schema clients release release-check clean under-test plain

# The proofs of data safety, each a package below proofs/ and a target here.
PROOFS   = corpus crash powercut faults model concurrency fuzz nodes
# A soak also runs the packages whose tests have a long form.
SOAKED   = $(PROOFS:%=./proofs/%) ./conformance ./conformance/data ./conformance/rules ./driver/filesystem
# The programs that the suite and the proofs start, built once for all packages. Runs that repeat
# what others do with the race detector start those below plain.
PROGRAMS = .cache/under-test
FIGURES  = .cache/figures
SUITE    = OXIDE_SIMULATOR=$(CURDIR)/$(PROGRAMS)/oxide-simulator \
	OXIDE_CSI_PLUGIN=$(CURDIR)/$(PROGRAMS)/oxide-csi-plugin \
	OXIDE_CONFORMANCE=$(CURDIR)/$(PROGRAMS)/oxide-conformance \
	OXIDE_PLAIN_PROGRAMS=$(CURDIR)/$(PROGRAMS)/plain \
	PROOF_FIGURES=$(CURDIR)/$(FIGURES) PROOF_SEED=$(SEED)

# The description behind "##" begins with who types the target; that behind "#" is of the others.
help:
	@for who in developer CI operator; do echo "$$who:"; \
		awk -F ":.*## $$who: " '/^[a-z0-9-]+:/ && NF > 1 {printf "  make %-14s %s\n", $$1, $$2}' \
			$(MAKEFILE_LIST); done
	@echo "make help-all lists the rest; the variables are at the top of the Makefile"

help-all: help # list every target
	@awk -F ':.*[^#]# ' '/^[a-z0-9-]+:/ && !/##/ && NF > 1 {printf "  make %-21s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)
	@echo "  make PROOF                 run one proof of data safety: $(PROOFS)"

build: ## operator: build the programs into bin/
	$(PLAIN) $(GO) build -o $(BIN)/ -ldflags='$(SAYS)' ./cmd/...

binaries: # compile what the images are made of: bin/linux-amd64 and bin/linux-arm64 (ARCH=amd64 for one)
	@for arch in $(ARCH); do \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch GOAMD64=v1 GOARM64=v8.0 $(GO) build -trimpath \
			-buildvcs=false -o $(BIN)/linux-$$arch/ -ldflags='-s -w $(SAYS)' ./cmd/... || exit 1; \
	done

sanity: ## developer: csi-sanity and our specs against driver and simulated rack
	@tools/prerequisites
	$(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./sanity

# Three packages at once also where there are two cores: most wait more than they compute.
test: under-test plain ## developer: every test: sanity, the proofs in their short form, all packages
	@tools/prerequisites --browser
	@rm -f $(FIGURES)
	$(PLAIN) $(GO) test -C tools -timeout=$(TIMEOUT) ./mutants ./release
	$(PLAIN) $(GO) test -C tools -count=1 ./crosscheck ./walls
	$(PLAIN) $(GO) test -C tools/monitoring -count=1 .
	$(SUITE) $(GO) test $(RACE) -p=3 -count=1 -timeout=$(TIMEOUT) ./...
	@cat $(FIGURES)

proofs: under-test ## developer: the proofs of data safety alone, SEED=7; make crash runs one
	@rm -f $(FIGURES)
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) $(PROOFS:%=./proofs/%)
	@cat $(FIGURES)

.PHONY: $(PROOFS)
$(PROOFS): under-test
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./proofs/$@

# The fault matrix runs whole, however short the duration.
soak: under-test plain ## CI: the proofs in their long form, in turn: DURATION=2h SEED=7
	@rm -f $(FIGURES)
	@for proof in $(SOAKED); do \
		echo "soak: $$proof, its share of $(DURATION)"; \
		$(SUITE) PROOF_DURATION=$(DURATION) PROOF_SHARES=$(words $(SOAKED)) \
			$(GO) test $(RACE) -count=1 -timeout=0 -v $$proof || exit 1; \
	done
	@cat $(FIGURES)

e2e: ## developer: the suite on a kind cluster: FOCUS=CP-10 KEEP=1 KUBERNETES=v1.36.4
	@$(E2E) -kubernetes $(KUBERNETES)

e2e-offline: ## developer: the same suite with images built here, without a registry
	@$(E2E) -offline

e2e-down: ## developer: remove the cluster that a run with KEEP=1 has left
	@$(PLAIN) $(GO) run ./e2e/run -down

under-test:
	@tools/prerequisites
	@$(GO) build $(RACE) -o $(PROGRAMS)/ ./cmd/...

plain:
	@$(PLAIN) $(GO) build -o $(PROGRAMS)/plain/ ./cmd/oxide-simulator ./cmd/oxide-csi-plugin ./cmd/oxide-conformance

# OXIDE_CSI_PLUGIN_BEFORE=FILE compares with an earlier driver.
bench: ## developer: measure stages, publishes, memory, start-up and sizes
	@tools/prerequisites
	$(GO) test -count=1 -timeout=$(TIMEOUT) -p=1 -run '^$$' -bench . -benchtime=15x -v ./driver/filesystem ./sanity

# PICTURE=FILE draws the whole life as a page.
demo: ## operator: watch a volume live on a simulated rack; PAUSE=1 waits at each step
	@tools/prerequisites
	@$(GO) run ./cmd/oxide-conformance demo

conformance: ## operator: test the rack of OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT
	@$(PLAIN) $(GO) build -o bin/ ./cmd/oxide-conformance && bin/oxide-conformance run

docs: under-test ## developer: check the documentation, and run its commands
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) ./docs

conformance-simulator: under-test plain # the same program against a simulated rack, with hot-plug and without
	$(SUITE) $(GO) test $(RACE) -count=1 -timeout=$(TIMEOUT) -v ./conformance -run 'ARackWith(out)?HotPlug'

mutants: # change the driver in small places and see what its tests notice: PACKAGES=driver/mount TESTS=driver/node BUDGET=30s COUNT=200 SEED=7
	@$(GO) build -C tools -o $(CURDIR)/.cache/mutants ./mutants
	@.cache/mutants -n $(COUNT) -seed $(SEED) $(if $(TESTS),-tests $(TESTS)) -budget $(BUDGET) $(PACKAGES)

size: # lines of Go of each package, and of its tests
	@git ls-files '*.go' | xargs wc -l | awk '$$2 != "total" { package = $$2; \
		sub("/[^/]*$$", $$2 ~ /_test.go$$/ ? "/tests" : "", package); lines[package] += $$1 } \
		END { for (p in lines) print "FIGURE size package=" p " lines=" lines[p] }' | sort

check: fmt lint test ## developer: format, style and every test; green before a commit is shared

fmt: # say which files gofmt and goimports would change
	$(LINT) fmt --diff

lint: # vet, style, types also for macOS and illumos, the walls between the packages, and the workflows
	$(PLAIN) $(GO) run -C tools ./walls $(CURDIR)
	$(LINT) run --allow-parallel-runners
	$(PLAIN) $(GO) run -C tools ./crosscheck -tags e2e $(CURDIR) darwin illumos
	$(PLAIN) $(GO) tool -modfile=tools/go.mod actionlint -shellcheck= -pyflakes=

vulncheck: ## CI: fail if the programs reach a known vulnerability; asks vuln.go.dev
	@$(GO) tool -modfile=tools/go.mod govulncheck $(if $(VULNDB),-db $(VULNDB)) ./cmd/... || { \
		status=$$?; \
		[ $$status -eq 3 ] || echo "make vulncheck: nothing was checked. It needs the vulnerability" \
			"database: reach vuln.go.dev, or name a copy of it with VULNDB=file:///DIRECTORY" >&2; \
		exit $$status; }

manifests: ## developer: render the plain manifests from the Helm chart again
	$(GO) test -count=1 ./deploy -run TestThePlainManifestsAreTheChartRendered -update

schema: # check the simulator's answers against a rack's OpenAPI document: SPEC=FILE
	@test -n "$(SPEC)" || { echo "make schema: name the rack's OpenAPI document: make schema SPEC=FILE" >&2; exit 1; }
	OXIDE_OPENAPI=$(abspath $(SPEC)) $(GO) test -tags=openapi -count=1 -run Schema ./simulator/

clients: # run Oxide's own clients against a simulated rack: SOURCES=DIR SPEC=FILE (CONTRIBUTING.md)
	@SOURCES='$(SOURCES)' SPEC='$(SPEC)' tools/clients/run

# ARCH=amd64 for one architecture; IMAGES= without images.
release: ## operator: make all that users of a version need in dist/: VERSION=v1.2.3
	@$(GO) run -C tools ./release -version '$(VERSION)' -out '$(abspath $(DIST))' -arch '$(ARCH)' \
		-images=$(if $(IMAGES),true,false) $(if $(BASE),-base '$(abspath $(BASE))')

# It needs root, buildah and mmdebstrap.
release-check: ## CI: make a release with images twice, and compare
	@$(GO) test -C tools -tags images -count=1 -timeout=$(TIMEOUT) -v -run TestImages ./release

clean: # remove what was built
	rm -rf bin dist .cache
