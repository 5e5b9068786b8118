//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// read returns an object, and fails the assertions of g on an error.
func read[T any](ctx context.Context, g Gomega, all interface {
	Get(context.Context, string, metav1.GetOptions) (T, error)
}, name string) T {
	object, err := all.Get(ctx, name, metav1.GetOptions{})
	g.Expect(err).NotTo(HaveOccurred())
	return object
}

var _ = BeforeSuite(func(ctx SpecContext) {
	Expect(json.Unmarshal([]byte(os.Getenv("E2E_SETTINGS")), &config)).To(Succeed(),
		"the suite needs a prepared machine: run it with go run ./e2e/run, which prepares one")
	if config.StandIns != "" {
		GinkgoWriter.Println("Stand-ins, where no image can be had:", config.StandIns)
	}
	provider = cluster.NewProvider(cluster.ProviderWithDocker(),
		cluster.ProviderWithLogger(cmd.NewLogger()))
	kubeconfig := filepath.Join(config.Work, "kubeconfig")
	if config.Reuse {
		Expect(provider.ExportKubeConfig(clusterName, kubeconfig, false)).To(Succeed())
		machines = findNodes(provider)
	} else {
		create(ctx, kubeconfig)
	}
	api = newKube(kubeconfig)
	theRack = newRackClients(machines[controlPlane])
	By("installing the kinds that snapshots need", func() {
		applyAll(ctx, crds(config.CRDs))
	})
	By("installing the driver", func() { install(ctx) })
}, NodeTimeout(15*time.Minute))

// create creates the cluster, and registers its removal.
func create(ctx context.Context, kubeconfig string) {
	rackDir := filepath.Join(config.Work, "rack")
	// Remove what a killed run has left, because this run uses the same name.
	Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
	DeferCleanup(takeDown, kubeconfig)
	By("creating the cluster", func() {
		newCluster(provider, config, rackDir, kubeconfig)
		machines = findNodes(provider)
		for _, n := range machines {
			n.prepare(ctx)
		}
	})
	By("loading the images", func() {
		Expect(loadArchives(ctx, machines, config.Archives)).To(Succeed())
	})
}

// install installs the driver and the rack from the overlay, and waits until both serve.
func install(ctx context.Context) {
	installed = kustomized(overlay, "")
	rollOut(ctx, installed)
}

// takeDown removes the cluster. The program that runs the suite releases loop devices that are
// left, and removes the rack's files, however the suite ends.
func takeDown(kubeconfig string) {
	if config.Keep {
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

// settings contains what e2e/run has prepared, from the environment variable E2E_SETTINGS.
type settings struct {
	NodeImage, Kubernetes, CRDs, Work, Evidence, StandIns string
	Archives                                              []string
	// Previous is the directory of the previous release, and PreviousName its name; both are empty
	// without one.
	Previous, PreviousName string
	// Base is a tar of the images' base; empty means that of the Dockerfile.
	Base string
	// Reuse uses the cluster that an earlier run has kept, and its installation.
	Offline, Keep, Reuse bool
}
