//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	ginkgo "github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/cmd"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
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
	s         *fixture // of the current spec
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
	// A repeated spec would hide why it failed.
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

// read reads an object with one of the API's clients. It fails g's assertions on an error.
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

// takeDown removes the cluster. The program e2e/run releases the loop devices that are left, and
// removes the rack's files, even if the suite crashes.
func takeDown(kubeconfig string) {
	if config.Keep {
		GinkgoWriter.Printf("The cluster %s is kept. Look at it with KUBECONFIG=%s kubectl get pods -A\n",
			clusterName, kubeconfig)
		return
	}
	Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
}

var _ = BeforeEach(func(ctx SpecContext) {
	start := must(takeInventory(ctx))
	DeferCleanup(func(ctx SpecContext) {
		if err := sameInventory(ctx, start); err != nil {
			collectEvidence(ctx, "inventory")
			Expect(err).NotTo(HaveOccurred())
		}
	}, NodeTimeout(settleTimeout+evidenceTimeout))
	s = newFixture(ctx)
	DeferCleanup(func(ctx SpecContext) { s.close(ctx) }, NodeTimeout(settleTimeout))
}, NodeTimeout(time.Minute))

var _ = JustAfterEach(func(ctx SpecContext) {
	if CurrentSpecReport().Failed() {
		collectEvidence(ctx, "")
	}
}, NodeTimeout(evidenceTimeout))

// settings contains what e2e/run has prepared, from the environment variable E2E_SETTINGS.
type settings struct {
	NodeImage, Kubernetes, CRDs, Work, Evidence, StandIns string
	Archives                                              []string
	// Previous is the directory of the previous release, and PreviousName its name. Both are empty if
	// there is no previous release.
	Previous, PreviousName string
	// Base is a tar with the base of the product's images. Empty means the base in the Dockerfile.
	Base string
	// Reuse makes the suite use a cluster, with its installation, that an earlier run has kept.
	Offline, Keep, Reuse bool
}

// settleTimeout is how long it may take until nothing of a spec is left. Kubernetes detaches and
// deletes with pauses that grow after each refusal.
const settleTimeout = 2 * time.Minute

// evidenceTimeout is how long it may take to collect the evidence of a failure.
const evidenceTimeout = 2 * time.Minute

// nodeInventory is a script for a node. It prints one line for each mount of a volume, each
// directory that the kubelet keeps for a volume, each disk in the guest's view, and each of the
// driver's records. It leaves out the files of the flight recorder, which stay.
const nodeInventory = `
awk '$2 ~ "^/var/lib/kubelet/.*(kubernetes.io~csi|kubernetes.io/csi)" {print "mount " $2}' \
	/proc/mounts
for dir in /var/lib/kubelet/plugins/kubernetes.io/csi/csi.oxide.computer \
	/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/staging \
	/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish; do
	[ -d $dir ] || continue
	for entry in $(ls -A $dir); do echo "directory $dir/$entry"; done
done
for entry in $(ls -A /oxide/dev); do echo "device $entry"; done
for entry in $(ls -A /oxide/sys/block); do echo "sysfs $entry"; done
[ -d /run/csi.oxide.computer ] || exit 0
cd /run/csi.oxide.computer
for entry in $(find . -type f -name "*.json"); do echo "record $entry"; done`

// clusterKinds lists the kinds of objects that remain when a volume leaks.
var clusterKinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "PersistentVolume"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "VolumeAttachment"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"},
}

// takeInventory counts what exists: the rack's disks, snapshots and attachments; this machine's
// loop devices; the mounts, directories, devices and records of every worker; the cluster's
// volumes; and the taints and cordons of its nodes.
func takeInventory(ctx context.Context) (harness.Ledger, error) {
	found := harness.Ledger{}
	state, err := theRack.Admin.State(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range state.Disks {
		found["disk "+d.Name]++
	}
	for _, s := range state.Snapshots {
		found["snapshot "+s.Name]++
	}
	for _, a := range state.Attachments {
		found["attachment of "+a.DiskID+" to "+a.InstanceID]++
	}
	loops, err := loopdev.List()
	if err != nil {
		return nil, err
	}
	for _, own := range state.LoopDevices {
		found["the rack's loop device of "+own.Serial]++
		for _, disk := range loops {
			// Kubelets of another cluster on this machine may have loop devices, too, so count only those
			// of this rack's disks.
			for _, l := range loops {
				if disk.Path == own.Path && l.On(disk) {
					found["a kubelet's loop device of "+l.BackingFile]++
				}
			}
		}
	}
	for _, kind := range clusterKinds {
		objects, err := api.list(ctx, kind)
		if err != nil {
			return nil, err
		}
		for _, o := range objects {
			found[kind.Kind+" "+o.GetName()]++
		}
	}
	if err := addNodes(ctx, found); err != nil {
		return nil, err
	}
	return found, addWorkers(ctx, found)
}

// addNodes adds each Node's taints and cordon, and the node keeper's mark of the cordon.
func addNodes(ctx context.Context, found harness.Ledger) error {
	list, err := api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range list.Items {
		for _, t := range n.Spec.Taints {
			found[n.Name+": taint "+t.ToString()]++
		}
		if value, ok := n.Annotations[cordonMark]; ok {
			found[n.Name+": annotation "+cordonMark+"="+value]++
		}
		if n.Spec.Unschedulable {
			found[n.Name+": cordoned"]++
		}
	}
	return nil
}

func addWorkers(ctx context.Context, found harness.Ledger) error {
	var reports [len(workers)]string
	group, ctx := errgroup.WithContext(ctx)
	for i, worker := range workers {
		group.Go(func() (err error) {
			reports[i], err = machines[worker].run(ctx, nodeInventory)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for i, report := range reports {
		for line := range strings.Lines(report) {
			found[workers[i]+": "+strings.TrimSpace(line)]++
		}
	}
	return nil
}

// sameInventory waits until the inventory is the same as at the start.
func sameInventory(ctx context.Context, start harness.Ledger) error {
	err := poll(ctx, settleTimeout, func(ctx context.Context) error {
		now, err := takeInventory(ctx)
		if err != nil {
			return err
		}
		more, less := now.More(start), start.More(now)
		if len(more)+len(less) == 0 {
			return nil
		}
		return fmt.Errorf("%w:\nleft behind:\n  %s\ngone:\n  %s", errNotYet,
			strings.Join(more, "\n  "), strings.Join(less, "\n  "))
	})
	if err != nil {
		return fmt.Errorf("%s after the spec, the inventory differs from that before it: %w",
			settleTimeout, err)
	}
	return nil
}

// evidenceKinds lists the kinds of objects that are saved after a failure.
var evidenceKinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "Pod"},
	{Version: "v1", Kind: "Event"},
	{Version: "v1", Kind: "Node"},
	{Version: "v1", Kind: "PersistentVolume"},
	{Version: "v1", Kind: "PersistentVolumeClaim"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "VolumeAttachment"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "CSINode"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshot"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"},
}

// nodeEvidence contains scripts that run on every node, by the name of the file for their output.
// kind's own collection of logs is not used: an interrupt does not end it.
var nodeEvidence = map[string]string{
	"mounts.txt":  "cat /proc/mounts; losetup --list --output-all",
	"guest.txt":   "ls -lR /oxide 2>/dev/null | head -200; ls -lR /run/csi.oxide.computer 2>/dev/null",
	"journal.log": "journalctl --no-pager",
	// The logs of all containers, also of those that were restarted.
	"containers.log": "cd /var/log/pods && find . -name '*.log' -exec tail -n +1 -v {} +",
}

var notInFileNames = regexp.MustCompile(`[^A-Za-z0-9-]+`)

// collectEvidence writes everything known about a failure into one directory, and prints its path.
// It also records what could not be read. After an interrupt it does nothing, so that the run ends
// soon.
func collectEvidence(ctx context.Context, suffix string) {
	spec := CurrentSpecReport()
	if config.Evidence == "" || spec.State == ginkgo.SpecStateInterrupted {
		return
	}
	name := notInFileNames.ReplaceAllString(spec.FullText()+" "+suffix, "-")
	dir := filepath.Join(config.Evidence, strings.Trim(name[:min(len(name), 120)], "-"))
	keep := func(name string, content any, err error) {
		text, isText := content.(string)
		if !isText {
			document, marshalErr := yaml.Marshal(content)
			text, err = string(document), errors.Join(err, marshalErr)
		}
		if err != nil {
			text += "\n(not complete: " + err.Error() + ")\n"
		}
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(text), 0o644)); err != nil {
			GinkgoWriter.Println("keep evidence:", err)
		}
	}
	if api != nil {
		for _, kind := range evidenceKinds {
			list, err := api.list(ctx, kind)
			for _, object := range list {
				object.SetManagedFields(nil)
			}
			keep(strings.ToLower(kind.Kind)+"s.yaml", list, err)
		}
	}
	if theRack != nil {
		state, err := theRack.Admin.State(ctx)
		keep("rack/state.yaml", state, err)
		requests, err := theRack.Admin.Requests(ctx, 0)
		keep("rack/requests.yaml", requests, err)
	}
	for name, n := range machines {
		for file, script := range nodeEvidence {
			out, err := n.run(ctx, script)
			keep(filepath.Join(name, file), out, err)
		}
	}
	fmt.Fprintln(os.Stderr, "the evidence of the failure is in", dir)
}
