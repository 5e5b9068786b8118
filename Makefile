# `make help` lists the targets for a developer, for CI and for an operator, `make help-all` all
# targets. .ci/run and the workflows only call these targets; the most important is `make check`.

GO      ?= go
# RACE=-race runs all proofs with the race detector, not only those of RACED. SHORT= makes `make
# test` run as many cases as `make proofs`. ONLY names packages for `make proofs`, and PART one of
# the parts that GitHub runs as separate jobs.
RACE    ?=
SHORT   ?= -short
ONLY    ?=
PART    ?=
# The seed of the proofs, and the time of a whole soak.
SEED     ?= 1
DURATION ?= 30m
# The time limit of a package's tests.
TIMEOUT ?= 30m
# The choices of `make e2e`: the specs whose text matches FOCUS, or whose labels match LABEL, on
# that version of Kubernetes. Without both it runs all specs but the long ones. PREVIOUS is the tag
# or commit from which it upgrades, if not the default of e2e/run.
FOCUS      ?=
LABEL      ?=
KUBERNETES ?= v1.35.8
PREVIOUS   ?=
# The directory of the virtual machines' image, and the package of another kernel for it. Its
# subdirectory newer has the image of a later Debian: make vm moves volumes between both.
VMIMAGE  = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/oxide-simulator/vm
KERNEL   =
# The packages that `make mutants` changes.
PACKAGES ?= internal/volume internal/rack driver/controller
GREMLINS  = github.com/go-gremlins/gremlins/cmd/gremlins@v0.6.0
# The architectures of the images.
ARCH     ?= amd64 arm64
# The version that the binaries report. It is empty in a tree without git.
RELEASE ?= $(shell git describe --tags --always --dirty 2>/dev/null)
# The directory of the binaries.
BIN      = bin
# The version that `make release` makes, such as v1.2.3, and its folder. IMAGES= makes no images.
# BASE=FILE is a tar of Debian's root file system, for machines that cannot reach a registry.
# REGISTRY is where `make push` copies the images to.
VERSION  =
DIST     = dist
IMAGES   = yes
BASE     ?=
REGISTRY ?=
# The URL of a copy of Go's vulnerability database, file:///DIRECTORY, to use instead of the
# original.
VULNDB   =
# Builds without the race detector use the flags of a release, so that Go compiles and caches the
# libraries only once for both.
PLAIN    = CGO_ENABLED=0 GOFLAGS='$(strip $(GOFLAGS) -trimpath)'
# tools/tests shows the packages as they end, and saves the events. SUMMARY prints the slowest tests
# and the figures of a target and its tests. The figure "cold_s" is of a run that began with an
# empty cache, and "warm_s" of another run.
BEGAN   := $(shell date +%s)
LOOP    := $(shell [ -d "$$($(GO) env GOCACHE)/00" ] && echo warm_s || echo cold_s)
KEPT     = $(CURDIR)/.cache/testrun
TESTSUM  = PROOF_FIGURES=$(KEPT)/$@.figures tools/tests $(KEPT)/$@-$(1)
FRESH    = rm -f $(KEPT)/$@-*.json; : >$(KEPT)/$@.figures
SUMMARY  = cat $(KEPT)/$@.figures; grep -ho '[0-9]* cases are left to make proofs' $(KEPT)/$@-[!f]*.json | \
	awk '{n += $$1} END {if (NR) print "left to make proofs: " n " cases of " NR " tests"}'; \
	echo "the slowest:"; cat $(KEPT)/$@-*.json | $(KEPT)/gotestsum tool slowest --threshold 1s | head -n 5; \
	echo "evidence: all output is in $(KEPT)/$@-*.json"; \
	echo "FIGURE loop target=$@ $(LOOP)=$$(($$(date +%s) - $(BEGAN))) tests=$$(cat $(KEPT)/$@-*.json | \
		grep '"Test"' | grep -cE '"Action":"(pass|fail)"')"
# The packages that must compile on other systems than Linux.
ELSEWHERE = ./cmd/oxide-simulator ./cmd/oxide-conformance ./cmd/oxide-csi-plugin ./simulator/... \
	./conformance/... ./driver/... ./operate/... ./internal/... ./harness/... ./loopdev/...
# The linter caches its findings with absolute paths, so each tree has its own cache.
LINT     = $(PLAIN) GOLANGCI_LINT_CACHE=$(CURDIR)/.cache/golangci-lint $(GO) tool -modfile=tools/go.mod golangci-lint
MODULE   = github.com/oxidecomputer/oxide-csi-plugin
SAYS     = -X $(MODULE)/driver.Release=$(RELEASE) -X $(MODULE)/simulator/program.Release=$(RELEASE) \
	-X $(MODULE)/keeper.Release=$(RELEASE) -X main.Release=$(RELEASE)
E2E      = $(PLAIN) $(GO) run ./e2e/run $(if $(FOCUS),-focus '$(FOCUS)') $(if $(LABEL),-label '$(LABEL)') \
	$(if $(filter long,$(LABEL)),-timeout 4h) $(if $(PREVIOUS),-previous '$(PREVIOUS)')

.DEFAULT_GOAL := help
.PHONY: help help-all build binaries sanity test proofs soak e2e e2e-offline e2e-down bench demo docs conformance conformance-simulator
.PHONY: vm vm-image rehearsal check mutants size fmt lint vulncheck manifests schema clients release push release-check clean under-test testrun times ci

# The proofs of data safety, each a package below proofs/ and a target here.
PROOFS   = corpus crash powercut faults model concurrency nodes
# A soak also runs the packages whose tests have a long form. Its time has a share for each of them.
SHARES   = $(shell { grep -how 'proof\.New' $(SOAKED:%=%/*_test.go); echo fuzz; } | wc -l)
SOAKED   = $(PROOFS:%=./proofs/%) ./conformance ./conformance/data ./conformance/rules ./driver/filesystem
# The programs that the suite and the proofs start, built once for all packages: without the race
# detector, and with it in raced/.
PROGRAMS = $(CURDIR)/.cache/under-test
UNDER    = OXIDE_SIMULATOR=$(1)/oxide-simulator OXIDE_CSI_PLUGIN=$(1)/oxide-csi-plugin \
	OXIDE_CONFORMANCE=$(1)/oxide-conformance OXIDE_PLAIN_PROGRAMS=$(PROGRAMS) PROOF_SEED=$(SEED)
# `make lint` vets the tests, so these do not. Three packages run at once also on two cores, because
# most packages wait more than they compute.
TESTS    = env $(PLAIN) $(call UNDER,$(PROGRAMS)) $(GO) test -vet=off -p=3 -count=1 -timeout=$(TIMEOUT)
WITHRACE = env $(call UNDER,$(PROGRAMS)/raced) $(GO) test -race -vet=off -p=3 -count=1 -timeout=$(TIMEOUT)
# Further programs that the tests start. They are compiled before the tests, so that progress is
# seen.
TOOLS    = helm.sh/helm/v3/cmd/helm github.com/yannh/kubeconform/cmd/kubeconform \
	github.com/hashicorp/hcl/v2/cmd/hcldec github.com/hashicorp/hcl/v2/cmd/hclfmt
BUILD    = $(PLAIN) $(GO) build -o $(PROGRAMS)/ ./cmd/... && \
	$(PLAIN) $(GO) build -modfile=tools/go.mod -o $(PROGRAMS)/ $(TOOLS)
BUILDRACE = $(GO) build -race -o $(PROGRAMS)/raced/ ./cmd/...
# The packages that have more cases than -short runs. Those of RACED run with the race detector, and
# so do UNITS: they make many calls at once, or test data that goroutines share. For the race
# detector the cases of FEW are alike, so it gets only those of -short, and none of SERIAL, which
# render and compare texts: with it they take six times as long. RACE=-race changes neither.
WHOLE    = $(or $(ONLY),$(shell grep -rlE 'short\.(Some|Left|Skip)|testing\.Short|[.]Short\b' \
	--include='*_test.go' --exclude-dir=tools --exclude-dir=short . | sed 's|/[^/]*$$||' | sort -u))
RACED    = ./driver% ./keeper% ./internal% ./simulator% ./proofs/concurrency ./proofs/model ./sanity ./conformance/rules
UNITS    = ./driver/... ./keeper/... ./internal/... ./simulator/...
SERIAL   = ./deploy ./docs
FEW      = ./loopdev/... ./harness/... ./operate/... ./cmd/... ./conformance/guest ./conformance/report
disks    = ./proofs/corpus ./proofs/powercut
calls    = ./proofs/crash ./proofs/faults ./proofs/model ./proofs/concurrency ./proofs/nodes
UNRACED  = $(SERIAL) $(FEW:%/...=%/%)
others   = $(filter-out $(disks) $(calls),$(WHOLE))
CHOSEN   = $(if $(PART),$($(PART)),$(WHOLE))
NOTRACED = $(if $(RACE),$(filter $(UNRACED),$(CHOSEN)),$(filter-out $(RACED),$(CHOSEN)))
SOME     = $(ONLY)$(filter-out others,$(PART))
ISRACED  = $(if $(RACE),$(filter-out $(UNRACED),$(CHOSEN)),$(filter $(RACED),$(CHOSEN))) $(if $(SOME),,$(UNITS))
# The release is in the module tools.
MAKES    = $(if $(SOME),,$(call TESTSUM,release) env $(PLAIN) $(GO) -C tools test -json -count=1 \
	-timeout=$(TIMEOUT) ./release || failed=1;)

# The description after "##" begins with the user of the target. Targets with "#" are in help-all
# only.
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
	@$(PLAIN) $(GO) build -o $(PROGRAMS)/ ./cmd/oxide-simulator ./cmd/oxide-csi-plugin
	@$(TESTS) -v ./sanity

test: testrun ## developer: every test, the proofs with a few of their cases
	@tools/prerequisites --browser
	@$(BUILD)
	@$(FRESH); failed=0; $(call TESTSUM,tree) $(TESTS) -json $(SHORT) ./... || failed=1; \
		$(call TESTSUM,tools) env $(PLAIN) $(GO) -C tools test -json -count=1 -timeout=$(TIMEOUT) $(SHORT) ./... || failed=1; \
		$(call TESTSUM,monitoring) env $(PLAIN) $(GO) -C tools/monitoring test -json -count=1 -timeout=$(TIMEOUT) $(SHORT) . || failed=1; \
		$(SUMMARY); exit $$failed

proofs: testrun ## developer: the cases that `make test` leaves out: SEED=7, ONLY=./proofs/crash, RACE=-race
	@tools/prerequisites --browser
	@$(if $(CHOSEN),,$(error make proofs: there is no PART=$(PART)))$(BUILD)
	@$(FRESH); failed=0; $(if $(NOTRACED),$(call TESTSUM,plain) $(TESTS) -json $(NOTRACED) || failed=1;) \
		$(if $(strip $(ISRACED)),$(BUILDRACE) || exit 1; $(call TESTSUM,raced) $(WITHRACE) -json $(ISRACED) || failed=1;) \
		$(if $(SOME),,$(call TESTSUM,few) $(WITHRACE) -json -short $(FEW) || failed=1;) \
		$(MAKES) $(SUMMARY); exit $$failed

.PHONY: $(PROOFS) fuzz
fuzz: # fuzz what parses foreign bytes; go test runs its seeds: DURATION=10m
	@$(PLAIN) PROOF_SEED=$(SEED) tools/fuzz $(DURATION)

$(PROOFS): under-test
	$(if $(RACE)$(filter $(RACED),./proofs/$@),$(BUILDRACE) && $(WITHRACE),$(TESTS)) -v ./proofs/$@

soak: under-test ## CI: the proofs in their long form, in turn: DURATION=2h SEED=7
	@$(BUILDRACE)
	@rm -f .cache/figures
	@for proof in $(SOAKED); do \
		echo "soak: $$proof, its share of $(DURATION)"; \
		PROOF_FIGURES=$(CURDIR)/.cache/figures PROOF_DURATION=$(DURATION) PROOF_SHARES=$(SHARES) $(WITHRACE) -timeout=0 -v $$proof || exit 1; \
	done
	@$(PLAIN) PROOF_FIGURES=$(CURDIR)/.cache/figures PROOF_SEED=$(SEED) tools/fuzz $(DURATION) $(SHARES)
	@cat .cache/figures

ci: # what CI runs
	@$(MAKE) check
	@$(MAKE) proofs
	@$(MAKE) vm
	@$(MAKE) e2e-offline

vm-image: # make the image of the virtual machines from Debian's packages: KERNEL=linux-image-amd64
	@tools/prerequisites --machines
	@tools/vm-image $(VMIMAGE)/newer linux-image-cloud-amd64 trixie
	@tools/vm-image $(VMIMAGE) $(KERNEL)

vm: vm-image ## developer: test a driver in virtual machines as instances; SHORT= runs more cases
	@$(PLAIN) $(GO) build -o $(PROGRAMS)/ ./cmd/...
	@OXIDE_VM_IMAGE=$(VMIMAGE) $(TESTS) $(if $(SHORT),$(SHORT),-timeout=2h) -v ./proofs/vm

rehearsal: vm-image ## developer: run the commands of docs/conformance.md on three virtual machines: PARTS=rules
	@$(PLAIN) $(GO) build -o $(PROGRAMS)/ ./cmd/...
	@OXIDE_VM_IMAGE=$(VMIMAGE) OXIDE_REHEARSAL=yes REHEARSAL_PARTS='$(PARTS)' \
		$(TESTS) -timeout=0 -v ./proofs/vm -run Rehears

times: testrun # the tests of the last `make test` that took a second or more, the slowest first; TARGET=proofs
	@cat $(KEPT)/$(or $(TARGET),test)-*.json | $(KEPT)/gotestsum tool slowest --threshold 1s

testrun:
	@$(PLAIN) $(GO) build -modfile=tools/go.mod -o $(KEPT)/ gotest.tools/gotestsum

e2e: ## developer: the suite on a kind cluster: FOCUS=CP-9 KEEP=1 KUBERNETES=v1.36.4
	@$(E2E) -kubernetes $(KUBERNETES)

e2e-offline: ## developer: the same suite with images built here, without a registry
	@$(E2E) -offline

e2e-down: ## developer: remove the cluster of a run with KEEP=1
	@$(PLAIN) $(GO) run ./e2e/run -down

under-test:
	@tools/prerequisites
	@$(BUILD)

bench: ## developer: measure lists, memory, start-up and sizes
	@tools/prerequisites
	$(GO) test -count=1 -timeout=$(TIMEOUT) -p=1 -run '^$$' -bench . -benchtime=15x -v ./sanity

# PICTURE=FILE draws the whole life of the volume as a page.
demo: ## operator: watch a volume live on a simulated rack; PAUSE=1 waits at each step
	@tools/prerequisites
	@$(GO) run ./cmd/oxide-conformance demo

conformance: ## operator: test the rack of OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT
	@$(PLAIN) $(GO) build -o bin/ ./cmd/oxide-conformance && bin/oxide-conformance run

docs: under-test ## developer: check the documentation, and run its commands
	$(TESTS) ./docs

conformance-simulator: under-test # test a simulated rack with the same program, with hot-plug and without
	$(TESTS) -v ./conformance -run ConformsWithHotPlug

# Gremlins works on copies of the whole directory, so it gets one without .git and .cache.
mutants: # change packages in one place at a time, and list the changes that their tests do not notice: PACKAGES='driver/mount internal/rack'
	@copy=$$(mktemp -d) || exit 1; trap "rm -rf $$copy" EXIT; trap 'exit 130' INT TERM; \
	git ls-files -z | tar -c --null -T - | tar -x -C $$copy && cd $$copy && \
	for package in $(PACKAGES); do \
		$(GO) run $(GREMLINS) unleash --invert-logical --output-statuses=lc ./$$package || exit 1; \
	done

# If the tree has become smaller, lower MOST.
MOST     = 129758
size: # lines of Go of each package, and of its tests; fails above MOST
	@mkdir -p .cache; git ls-files '*.go' | xargs wc -l | awk '$$2 != "total" { package = $$2; \
		sub("/[^/]*$$", $$2 ~ /_test.go$$/ ? "/tests" : "", package); lines[package] += $$1 } \
		END { for (p in lines) { print "FIGURE size package=" p " lines=" lines[p]; all += lines[p] } \
			print "FIGURE size sum=" all " most=$(MOST)"; exit all > $(MOST) }' >.cache/size; \
		status=$$?; sort .cache/size; exit $$status

# In a new tree the linter takes minutes, on one core. So it runs at the same time as the tests.
check: ## developer: format, style and every test; green before a commit is shared
	@mkdir -p .cache
	@{ $(MAKE) fmt lint >.cache/lint.log 2>&1; echo $$? >.cache/lint.status; } & \
		$(MAKE) test; tested=$$?; wait; cat .cache/lint.log; \
		exit $$((tested + $$(cat .cache/lint.status)))

fmt: # show the changes that gofmt and goimports would make
	$(LINT) fmt --diff

lint: # vet, style, types also for macOS and illumos, the imports of the packages, the size, and the workflows
	@$(MAKE) -s size >/dev/null || { grep sum= .cache/size; echo "lint: the tree has grown; delete unneeded code"; exit 1; }
	$(PLAIN) tools/walls.sh
	$(LINT) run --allow-parallel-runners
	for system in darwin illumos; do GOOS=$$system $(PLAIN) $(GO) vet $(ELSEWHERE) || exit 1; done
	$(PLAIN) $(GO) tool -modfile=tools/go.mod actionlint -shellcheck= -pyflakes=

vulncheck: ## CI: fail if the programs reach a known vulnerability; asks vuln.go.dev
	@$(GO) tool -modfile=tools/go.mod govulncheck $(if $(VULNDB),-db $(VULNDB)) ./cmd/... || { \
		status=$$?; \
		[ $$status -eq 3 ] || echo "make vulncheck: nothing was checked. It needs the vulnerability" \
			"database: reach vuln.go.dev, or name a copy of it with VULNDB=file:///DIRECTORY" >&2; \
		exit $$status; }

manifests: ## developer: render the plain manifests, and what each value changes, from the Helm chart
	$(GO) test -count=1 ./deploy -run ChartRender -update

schema: # check the simulator's answers against a rack's OpenAPI document: SPEC=FILE
	@test -n "$(SPEC)" || { echo "make schema: name the rack's OpenAPI document: make schema SPEC=FILE" >&2; exit 1; }
	OXIDE_OPENAPI=$(abspath $(SPEC)) $(GO) test -tags=openapi -count=1 -run Schema ./simulator/

clients: # run Oxide's own clients against a simulated rack: SOURCES=DIR SPEC=FILE (docs/howto/simulator-clients.md)
	@SOURCES='$(SOURCES)' SPEC='$(SPEC)' tools/clients/run

# ARCH=amd64 for one architecture; IMAGES= without images.
release: ## operator: make the files of a version for its users in dist/: VERSION=v1.2.3
	@$(GO) run -C tools ./release -version '$(VERSION)' -out '$(abspath $(DIST))' -arch '$(ARCH)' \
		-images=$(if $(IMAGES),true,false) $(if $(BASE),-base '$(abspath $(BASE))')

push: ## operator: copy the images and the chart in dist/ to REGISTRY=registry.example.com
	@test -n '$(REGISTRY)' || { echo 'push: expected REGISTRY=HOST, such as registry.example.com' >&2; exit 1; }
	@crane=$$($(GO) tool -modfile=tools/go.mod -n crane) || exit 1; \
	while read -r image tag platform _; do \
		test "$$platform" = all || continue; \
		layout=$$(mktemp -d) || exit 1; code=0; \
		tar -xf "$(DIST)/$${image#*/}.oci.tar" -C "$$layout" && \
			"$$crane" push "$$layout" "$(REGISTRY)/$$image:$$tag" || code=1; \
		rm -r "$$layout"; test "$$code" = 0 || exit 1; \
	done <"$(DIST)/DIGESTS"

# It needs root, buildah and mmdebstrap.
release-check: ## CI: make a release with images twice, and compare
	@$(GO) test -C tools -tags images -count=1 -timeout=$(TIMEOUT) -v -run TestImages ./release

clean: # remove the built files, and the files of failed runs from memory
	rm -rf bin dist .cache /dev/shm/oxide-sanity-*
