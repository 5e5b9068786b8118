//go:build e2e

package e2e

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/cmd"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// BeforeSuite sets these for all specs.
var (
	config   settings
	provider *cluster.Provider
	machines map[string]node
	api      *kube
	theRack  *rackClients
	// installed contains what the suite installed, as it was applied.
	installed []*unstructured.Unstructured
	// s is the namespace of the current spec.
	s *fixture
)

// eventuallyTimeout is how long a spec waits for a condition.
const eventuallyTimeout = 90 * time.Second

func TestEndToEnd(t *testing.T) { // E-2
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(eventuallyTimeout)
	SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	// Without this, a wait that has a context ends only with the context.
	EnforceDefaultTimeoutsWhenUsingContexts()
	suite, reporter := GinkgoConfiguration()
	// A flaky spec has to be understood, not repeated.
	suite.FlakeAttempts, suite.RandomizeAllSpecs = 0, false
	// The stack of a failure shows the line of the spec, whatever helper has failed.
	reporter.Verbose, reporter.FullTrace = true, true
	RunSpecs(t, "the driver on a Kubernetes cluster", suite, reporter)
}

// must returns a value, and fails the spec on an error.
func must[T any](value T, err error) T {
	Expect(err).NotTo(HaveOccurred())
	return value
}

var _ = BeforeSuite(func(ctx SpecContext) {
	config = must(readSettings())
	if config.standIns != "" {
		GinkgoWriter.Println("Stand-ins, where no image can be had:", config.standIns)
	}
	provider = cluster.NewProvider(cluster.ProviderWithDocker(),
		cluster.ProviderWithLogger(cmd.NewLogger()))
	kubeconfig := filepath.Join(config.work, "kubeconfig")
	if config.reuse {
		Expect(provider.ExportKubeConfig(clusterName, kubeconfig, false)).To(Succeed())
		machines = must(findNodes(provider))
	} else {
		create(ctx, kubeconfig)
	}
	api = must(newKube(kubeconfig))
	theRack = must(newRackClients(machines[controlPlane]))
	By("installing the kinds that snapshots need", func() {
		Expect(applyAll(ctx, must(crds(config.crds)))).To(Succeed())
	})
	By("installing the driver", func() { install(ctx) })
}, NodeTimeout(15*time.Minute))

// create creates the cluster, and registers its removal.
func create(ctx context.Context, kubeconfig string) {
	rackDir := filepath.Join(config.work, "rack")
	// Remove what a killed run has left, because this run uses the same name.
	Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
	DeferCleanup(takeDown, kubeconfig)
	By("creating the cluster", func() {
		Expect(newCluster(provider, config, rackDir, kubeconfig)).To(Succeed())
		machines = must(findNodes(provider))
		for _, n := range machines {
			Expect(n.prepare(ctx)).To(Succeed())
		}
	})
	By("loading the images", func() {
		Expect(loadArchives(ctx, machines, config.archives)).To(Succeed())
	})
}

// install installs the driver and the rack from the overlay, and waits until both serve.
func install(ctx context.Context) {
	installed = must(kustomized(overlay, ""))
	Expect(applyAll(ctx, installed)).To(Succeed())
	Expect(rolledOut(ctx, installed)).To(Succeed())
	for _, worker := range workers {
		Expect(registered(ctx, worker)).To(Succeed())
	}
}

// takeDown removes the cluster. The program that runs the suite releases loop devices that are
// left, and removes the rack's files, however the suite ends.
func takeDown(kubeconfig string) {
	if config.keep {
		GinkgoWriter.Printf("The cluster %s is kept. Look at it with KUBECONFIG=%s kubectl get pods -A\n",
			clusterName, kubeconfig)
		return
	}
	Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
}

var _ = BeforeEach(func(ctx SpecContext) {
	start := must(takeLedger(ctx))
	DeferCleanup(func(ctx SpecContext) { settle(ctx, start) }, NodeTimeout(settleTimeout*2))
	s = newFixture(ctx)
	DeferCleanup(func(ctx SpecContext) { s.close(ctx) }, NodeTimeout(settleTimeout))
}, NodeTimeout(time.Minute))

// settle runs at the end of every spec.
func settle(ctx context.Context, start harness.Ledger) {
	if err := balanced(ctx, start); err != nil {
		collectEvidence("ledger")
		Expect(err).NotTo(HaveOccurred())
	}
}

var _ = JustAfterEach(func() {
	if CurrentSpecReport().Failed() {
		collectEvidence("")
	}
})
