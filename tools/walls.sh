#!/bin/sh -eu
# Checks two rules that depguard in .golangci.yml cannot check: each package has a rule there, and a
# program does not link certain libraries through other packages.
module=github.com/oxidecomputer/oxide-csi-plugin
kubernetes='k8s.io/(api|apimachinery|client-go|kubelet|klog/v2|utils/ptr)'
ginkgo='github.com/onsi/(ginkgo/v2|gomega)'
rpc='google.golang.org/grpc|github.com/container-storage-interface/spec'
bad=0
for package in $(go list -tags e2e ./...); do
	grep -q "^        ${package#"$module"/}: {list-mode: strict" .golangci.yml || {
		echo "$package has no rule in .golangci.yml, so it may import nothing" >&2
		bad=1
	}
done
# never PACKAGE LIBRARIES PROMISE
never() {
	if go list -deps "./$1" | grep -E "^($2)(/|\$)" >&2; then
		echo "$1 must not link these packages: $3" >&2
		bad=1
	fi
}
never cmd/oxide-csi-plugin "$kubernetes|$ginkgo|testing" 'the driver serves any container orchestrator'
never driver/node github.com/oxidecomputer/oxide.go 'a node needs no token'
never cmd/oxide-simulator "github.com/oxidecomputer/oxide.go|$rpc" 'a rack does not know its drivers'
never simulator/simulatortest "$rpc|$kubernetes|$ginkgo" \
	"tests of other programs are not made heavy by the driver's libraries"
never cmd/oxide-conformance 'k8s.io/(api|apimachinery|client-go|utils/ptr)' 'conformance needs no cluster'
never harness "$ginkgo|github.com/kubernetes-csi/csi-test/v5|testing" \
	'proofs, benchmarks and the demo use the harness without a suite'
exit $bad
