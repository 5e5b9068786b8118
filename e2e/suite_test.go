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

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// BeforeSuite sets these variables.
var (
	config   settings
	provider *cluster.Provider
	machines map[string]node
	api      *kube
	theRack  *rackClients
	// installed contains the objects of the suite's installation, as they were applied.
	installed []*unstructured.Unstructured
	s         *fixture // of the current spec
)

// eventuallyTimeout is the default time in which a condition of a spec has to become true.
const eventuallyTimeout = 90 * time.Second

func TestEndToEnd(t *testing.T) { // E-2
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(eventuallyTimeout)
	SetDefaultEventuallyPollingInterval(200 * time.Millisecond)
	// Without this call, an Eventually with a context waits until the context ends.
	EnforceDefaultTimeoutsWhenUsingContexts()
	suite, reporter := GinkgoConfiguration()
	// Do not repeat a failed spec, because a success of the second run hides the failure.
	suite.FlakeAttempts, suite.RandomizeAllSpecs = 0, false
	// The full stack shows the line of the spec if a helper function fails.
	reporter.Verbose, reporter.FullTrace = true, true
	RunSpecs(t, "the driver on a Kubernetes cluster", suite, reporter)
}

func must[T any](value T, err error) T {
	Expect(err).NotTo(HaveOccurred())
	return value
}

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

func create(ctx context.Context, kubeconfig string) {
	rackDir := filepath.Join(config.Work, "rack")
	// A killed run may have left a cluster of this name.
	Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
	// This cleanup deletes only the cluster. When the suite has ended, even by a crash, the program
	// e2e/run detaches the remaining loop devices and removes the rack's files.
	DeferCleanup(func() {
		if !config.Keep {
			Expect(provider.Delete(clusterName, kubeconfig)).To(Succeed())
			return
		}
		GinkgoWriter.Printf("The cluster %s is kept. Look at it with KUBECONFIG=%s kubectl get pods -A\n",
			clusterName, kubeconfig)
	})
	By("creating the cluster", func() {
		newCluster(provider, config, rackDir, kubeconfig)
		machines = findNodes(provider)
		for _, n := range machines {
			n.prepare(ctx)
		}
	})
	By("loading the images", func() {
		var group errgroup.Group
		for _, n := range machines {
			group.Go(func() error { return n.load(config.Archive) })
		}
		Expect(group.Wait()).To(Succeed())
	})
}

func install(ctx context.Context) {
	installed = kustomized(deploy.Files, overlay, "")
	rollOut(ctx, installed)
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

// settings has the values that e2e/run passes in the environment variable E2E_SETTINGS.
type settings struct {
	NodeImage, Kubernetes, CRDs, Work, Evidence, StandIns, Archive string
	// Previous is the source tree of the previous release, and PreviousName the release's name. Both
	// are empty if no release precedes this tree.
	Previous, PreviousName string
	// Base is a tar file of the driver's base image, or "" for the base image in the Dockerfile.
	Base string
	// Reuse makes the suite use the cluster that an earlier run with Keep has left.
	Offline, Keep, Reuse bool
}

// settleTimeout is the time in which everything that a spec created has to disappear. It is long
// because Kubernetes repeats a refused detach or delete after growing pauses.
const settleTimeout = 2 * time.Minute

const evidenceTimeout = 2 * time.Minute

// nodeInventory is a shell script that prints the mounts, directories, devices and records of
// volumes on a node. It omits the flight recorder's files, which outlive volumes.
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

// clusterKinds lists the kinds of objects that a leaked volume leaves behind.
var clusterKinds = []schema.GroupVersionKind{
	{Version: "v1", Kind: "PersistentVolume"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "VolumeAttachment"},
	{Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"},
}

func takeInventory(ctx context.Context) (found harness.Ledger, err error) {
	defer harness.Catch(&err)
	found = harness.Ledger{}
	state := harness.Got(theRack.Admin.State(ctx))
	for _, d := range state.Disks {
		found["disk "+d.Name]++
	}
	for _, s := range state.Snapshots {
		found["snapshot "+s.Name]++
	}
	for _, a := range state.Attachments {
		found["attachment of "+a.DiskID+" to "+a.InstanceID]++
	}
	loops := harness.Got(loopdev.List())
	for _, own := range state.LoopDevices {
		found["the rack's loop device of "+own.Serial]++
		for _, disk := range loops {
			// Count only the loop devices of this rack's disks: kubelets of another cluster on this machine
			// may have loop devices, too.
			for _, l := range loops {
				if disk.Path == own.Path && l.On(disk) {
					found["a kubelet's loop device of "+l.BackingFile]++
				}
			}
		}
	}
	for _, kind := range clusterKinds {
		for _, o := range harness.Got(api.list(ctx, kind)) {
			found[kind.Kind+" "+o.GetName()]++
		}
	}
	for _, n := range harness.Got(api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})).Items {
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
	return found, addWorkers(ctx, found)
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

const evidenceKinds = "pods events nodes persistentvolumes persistentvolumeclaims " +
	"volumeattachments csinodes volumesnapshots volumesnapshotcontents"

// nodeEvidence maps the name of a file to the script whose output it contains. The scripts run on
// every node. They replace kind's export of logs, which continues after an interrupt.
var nodeEvidence = map[string]string{
	"mounts.txt":  "cat /proc/mounts; losetup --list --output-all",
	"guest.txt":   "ls -lR /oxide 2>/dev/null | head -200; ls -lR /run/csi.oxide.computer 2>/dev/null",
	"journal.log": "journalctl --no-pager",
	// This file contains the logs of all containers, even of restarted ones.
	"containers.log": "cd /var/log/pods && find . -name '*.log' -exec tail -n +1 -v {} +",
}

var notInFileNames = regexp.MustCompile(`[^A-Za-z0-9-]+`)

// collectEvidence saves objects, logs and the rack's state after a failure. After an interrupt it
// does nothing, so that the run ends soon.
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
	if n, ok := machines[controlPlane]; ok {
		for kind := range strings.FieldsSeq(evidenceKinds) {
			out, err := n.run(ctx, kubectlCommand+"get --all-namespaces --output=yaml "+kind)
			keep(kind+".yaml", out, err)
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
